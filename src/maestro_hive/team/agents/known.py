"""The agents that are known, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.agents.aider import Aider
from maestro_hive.team.agents.calls import Call, Permissions
from maestro_hive.team.agents.claude import Claude
from maestro_hive.team.agents.codex import Codex
from maestro_hive.team.agents.gemini import Gemini
from maestro_hive.team.agents.opencode import Opencode
from maestro_hive.team.agents.qwen import Qwen

if TYPE_CHECKING:
    from maestro_hive.team.agents.adapter import Adapter
    from maestro_hive.team.graph import Persona

ADAPTERS: dict[str, Adapter] = {
    each.name: each for each in (Claude(), Codex(), Gemini(), Opencode(), Qwen(), Aider())
}


def adapter(name: str) -> Adapter:
    """Return the adapter of an agent; raise ``ConfigurationError`` if there is none."""
    found = ADAPTERS.get(name)
    if found is None:
        raise ConfigurationError(f"{name!r} is no agent; use one of {', '.join(ADAPTERS)}")
    return found


def call_for(persona: Persona, *, prompt: str, folder: str, **more: Any) -> Call:
    """Return a call of a persona's agent, as the graph says: model, arguments and permissions.

    ``more`` are further fields of ``Call``: session, budget, schema, feedback.
    """
    return Call(
        prompt=prompt,
        folder=folder,
        model=persona.model,
        args=persona.args,
        permissions=Permissions(persona.permissions or Permissions.OWN),
        **more,
    )
