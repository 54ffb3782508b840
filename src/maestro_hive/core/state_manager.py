"""Re-exports ``maestro_hive.maestro.state.state_manager`` at a path callers import from."""

from maestro_hive.maestro.state.state_manager import StateChange, StateManager, get_state_manager

__all__ = ["StateChange", "StateManager", "get_state_manager"]
