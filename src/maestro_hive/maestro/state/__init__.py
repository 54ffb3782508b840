"""State that survives: the journal, documents, checkpoints."""
