"""A door: the state manager lives in ``maestro_hive.maestro.state.state_manager``."""

from maestro_hive.maestro.state.state_manager import StateChange, StateManager, get_state_manager

__all__ = ["StateChange", "StateManager", "get_state_manager"]
