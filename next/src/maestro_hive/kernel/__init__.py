"""Errors, clocks, files, locks, threads, signals, logs and redaction, for every other package."""
