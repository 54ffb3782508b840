"""Import paths of existing callers; the modules here only re-export."""
