"""Doors at the paths that existing callers import from."""
