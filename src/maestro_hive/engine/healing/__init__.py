"""Healing: what failed is described, a healer proposes a fix, and the next attempt gets it.

``failure`` has the words, ``detector`` finds failures in what tests, logs and executions left behind,
``healers`` propose fixes for one type each, ``engine`` holds the healers, and ``stage`` is what the path
of a step calls between two attempts.
"""
