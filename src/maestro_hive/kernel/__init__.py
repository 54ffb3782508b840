"""What every other package uses: errors, clocks, files, locks, threads and notifications."""
