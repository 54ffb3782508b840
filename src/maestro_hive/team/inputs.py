"""What tasks and gates are executed with, as it is recorded: when it changes, they are executed again."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from maestro_hive.team.graph import Persona
from maestro_hive.team.prompts import prompt_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Gate, Graph, Task

#: Larger files are not read for their digest.
_MOST_FILE_BYTES = 64 * 1024 * 1024


def task_input(graph: Graph, task: Task) -> dict[str, Json]:
    """Return what a task is executed with: when this changes, it is executed again."""
    persona = graph.persona_of(task)
    assert persona is not None, "check_personas has refused the graph"
    given: dict[str, Json] = {
        "id": task.id,
        "title": task.title,
        "prompt": prompt_of(task),
        "persona": _persona_input(persona),
        "files": list(task.files.owned),
    }
    if task.output_schema is not None:
        given["output_schema"] = task.output_schema
    if task.verification is not None:
        check = task.verification
        given["verification"] = {
            "command": check.command,
            "timeout_seconds": check.timeout_seconds,
            "expected": check.expected,
        }
    return given


def _persona_input(persona: Persona) -> dict[str, Json]:
    if persona.python is not None:
        return {"python": persona.python}
    if persona.agent is None:
        return {"command": list(persona.command or ())}
    return {
        "agent": persona.agent,
        "model": persona.model,
        "args": list(persona.args),
        "permissions": persona.permissions,
    }


def agent_persona(given: dict[str, Json]) -> Persona:
    """Return the persona of an agent from what is recorded of it."""
    return Persona(name=given["agent"], **{**given, "args": tuple(given["args"])})


def with_answer(given: dict[str, Json], asked: str, answer: str) -> dict[str, Json]:
    """Return what a task is executed with after it has asked for something, and got an answer."""
    return {**given, "prompt": f"{given['prompt']}\nYou asked: {asked}\nThe answer: {answer}\n"}


def gate_input(gate: Gate, results: Mapping[str, Json]) -> dict[str, Json]:
    """Return what a gate is executed with, after what the tasks of its level have made."""
    return {
        "gate": gate.name,
        "command": gate.command,
        "required": gate.required,
        "after": dict(results),
    }


def digests(folder: Path, paths: list[str]) -> dict[str, str]:
    """Return the SHA-256 of those files that exist."""
    found = {}
    for each in paths:
        path = folder / each
        try:
            if path.is_file() and path.stat().st_size <= _MOST_FILE_BYTES:
                found[each] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
    return found
