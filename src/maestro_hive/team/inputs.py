"""What tasks and gates are executed with, as it is recorded: when it changes, they are executed again."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from typing import TYPE_CHECKING

from maestro_hive.maestro.state import codec
from maestro_hive.team.folder_files import digest_of_file, digest_of_folder
from maestro_hive.team.graph import Persona, owned_folder
from maestro_hive.team.prompts import told

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Gate, Graph, Level, Task

#: The member of a task's input that has what it asked for, and the answers that it got.
ANSWERS = "answers"
#: Made once: ``json.dumps`` makes one for every call.
_encoder = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def task_input(graph: Graph, task: Task) -> dict[str, Json]:
    """Return what a task is executed with: when this changes, it is executed again.

    It has what the graph says, and not the prompt, which is made of this for each attempt.
    """
    persona = graph.persona_of(task)
    assert persona is not None, "check_personas has refused the graph"
    given: dict[str, Json] = {
        "id": task.id,
        "title": task.title,
        "told": told(task),
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
    return {**given, ANSWERS: [*given.get(ANSWERS, ()), {"asked": asked, "answer": answer}]}


def digest_of(given: dict[str, Json]) -> str:
    """Return the SHA-256 of what a task is executed with."""
    text = _encoder.encode(given)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def without_answers(given: dict[str, Json]) -> dict[str, Json]:
    """Return what a task was executed with before it asked for anything."""
    return {name: value for name, value in given.items() if name != ANSWERS}


def results_up_to(level: Level, graph: Graph, results: Mapping[str, Json]) -> dict[str, Json]:
    """Return what the gates of a level are executed after: the results of all tasks up to it."""
    tasks = (task.id for task in graph.tasks if task.level <= level.number)
    return {each: results[each] for each in tasks if each in results}


def gate_input(
    gate: Gate, results: Mapping[str, Json], inputs: Mapping[str, str]
) -> dict[str, Json]:
    """Return what a gate is executed with, after tasks with these results.

    ``inputs`` are the digests of what the tasks were executed with: one that declares no files has the
    same result whatever it has done.
    """
    after = {name: [inputs[name], result] for name, result in results.items()}
    return {
        "gate": gate.name,
        "command": gate.command,
        "required": gate.required,
        "after": codec.canonical_digest(after, "results").hex(),
    }


def missing_files(graph: Graph, folder: Path, results: Mapping[str, Json]) -> dict[str, list[str]]:
    """Return the files that complete tasks have made and that are not there, by task.

    Not those that another task may have deleted since.
    """
    owners = Counter(path for task in graph.tasks for path in task.files.owned)
    found: dict[str, list[str]] = {}
    for name, result in results.items():
        for path in result["files"]:
            if owners[path] == 1 and not os.path.lexists(folder / owned_folder(path)[0]):
                found.setdefault(name, []).append(path)
    return found


def files_not_made(graph: Graph, folder: Path, results: Mapping[str, Json]) -> dict[str, list[str]]:
    """Return the files that complete tasks were to create, and that nobody has made, by task."""
    found: dict[str, list[str]] = {}
    for task in graph.tasks:
        made = results[task.id]["files"] if task.id in results else task.files.create
        for path in task.files.create:
            if path not in made and not os.path.lexists(folder / owned_folder(path)[0]):
                found.setdefault(task.id, []).append(path)
    return found


def digests(folder: Path, paths: Iterable[str], apart: Collection[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of the files of a task that exist, and of its folders with all that is in them.

    ``apart`` are folders that are nobody's, by their real paths.
    """
    found = {}
    for each in paths:
        name, is_folder = owned_folder(each)
        path = folder / name
        digest = digest_of_folder(path, apart) if is_folder else digest_of_file(path)
        if digest is not None:
            found[each] = digest.hex()
    return found
