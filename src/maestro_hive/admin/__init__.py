"""What people do to a state folder, as plain functions with typed results.

The command line and the dashboard share them. Nothing here prints, asks, or parses arguments.
Functions that read take a ``Reader``, those that change something a ``Store``; ``folder`` opens
both.
"""
