"""The fault tests: one row for each promise, which ``python -m faults`` runs and prints."""
