"""Measurements of speed and of what it costs: each module is a program."""
