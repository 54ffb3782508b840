"""What a Hive is made with: its arguments, checked, and what they stand for."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import settings
from maestro_hive.engine.config import ExecutionConfig, get_execution_config
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from maestro_hive.engine.policy import Enforcer
    from maestro_hive.engine.policy_rules import PolicyEnforcer


def enforcer_of(
    policy: str | Path | PolicyEnforcer | None, enforcer: Enforcer | None, workspace: Path | None
) -> Enforcer | None:
    """Return what decides about the calls of steps."""
    if policy is not None and enforcer is not None:
        raise ConfigurationError("Hive() takes a policy or an enforcer, and was given both")
    if isinstance(policy, str | PathLike):
        from maestro_hive.engine.policy_rules import (
            PolicyEnforcer,
        )

        return PolicyEnforcer.from_file(policy, workspace)
    decides: object = enforcer if policy is None else policy
    if decides is not None and not callable(getattr(decides, "check", None)):
        raise settings.refused("the enforcer", decides, "an object with a method check")
    return enforcer if policy is None else policy


def limits_of(budget: object) -> dict[str, Any]:
    """Return the limits that a hive declares, by account."""
    if budget is None:
        return {}
    from maestro_hive.hive.budgets import declared_budgets

    return declared_budgets(budget)


def audit_of(given: bool | str | Path | None, enforcer: Enforcer | None) -> bool | Path:
    """Return where an audit log is written: a path, or whether it is in the state folder."""
    if isinstance(given, bool | None):
        if given and enforcer is None:
            raise ConfigurationError(
                "audit_log=True: nothing decides; give a policy or an enforcer"
            )
        return enforcer is not None if given is None else given
    path: object = given
    if not isinstance(path, str | PathLike) or not str(path):
        raise settings.refused("audit_log", given, "a path, True or False")
    return Path(given).expanduser().absolute()


def config_for(folder: str | Path | None, config: ExecutionConfig | None) -> ExecutionConfig:
    """Return the configuration of a hive over this folder, or over the one that it names."""
    if isinstance(folder, str) and "://" in folder:
        raise ConfigurationError(
            f"Hive({folder!r}): this version stores state in a folder, and takes no address"
        )
    if folder is None:
        return (config or get_execution_config()).frozen()
    given: object = folder
    if not isinstance(given, str | PathLike) or not str(given):
        raise ConfigurationError(f"Hive({folder!r}): a state folder is named by a text or a Path")
    base = ExecutionConfig() if config is None else config
    place = Path(folder).expanduser().absolute()  # now: the program may go elsewhere
    state = replace(base.state, state_dir=str(place), checkpoint_dir=str(place / "checkpoints"))
    return replace(base, state=state).frozen()


def grace_of(seconds: object) -> float:
    """Return for how long a workflow that is cancelled may clean up."""
    return float(settings.number(0)("cancel_grace", seconds))
