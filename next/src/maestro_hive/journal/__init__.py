"""The journal: the append-only log of entries, the values in them, and the stores that hold it."""
