"""Durable execution for teams of AI agents: a completed step never runs again."""

__version__ = "0.1.0"

__all__ = ["__version__"]
