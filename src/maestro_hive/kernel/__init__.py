"""What everything stands on: errors, time, files and news."""
