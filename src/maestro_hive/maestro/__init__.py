"""The rooms the first Maestro named; state lives in ``maestro.state``."""
