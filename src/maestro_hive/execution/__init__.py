"""Doors to what older callers import from here."""
