"""Task graphs on disk: reading and checking a file, the example, and programs that are missing.

The pure part is ``team.graph``; here is what needs a disk, an environment, or a library for JSON
Schema.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, DocumentCorruptError, StorageError
from maestro_hive.team.graph import Checked, GraphError, Problem, check_document, check_graph
from maestro_hive.team.graph.commands import needed_programs
from maestro_hive.team.graph.documents import (
    MAX_BYTES,
    Document,
    UnreadableError,
    json_path,
    parse_document,
)
from maestro_hive.team.graph.problems import MOST
from maestro_hive.team.results import schema_problem
from maestro_hive.team.state import load_schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jsonschema import Draft7Validator

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Graph
    from maestro_hive.team.graph.documents import Form
    from maestro_hive.team.results import SchemaProblem

#: What ``maestro init`` writes, without its suffix.
EXAMPLE_NAME = "task-graph"
#: More of a message of the library is not shown: it may quote whole tasks.
_SHOWN = 200


def check_file(path: str | Path, *, strict: bool = False) -> Checked:
    """Return the graph of a file, or everything that is wrong with it.

    A file that cannot be read raises a ``MaestroError``. The suffix ``.toml`` or ``.json`` says how it
    is written; another one leaves that to its first character.
    """
    data = _contents(Path(path))
    form = _form(Path(path))
    try:
        document = parse_document(data, form)
    except UnreadableError:
        return check_graph(data, form)
    document.file = str(path)
    checked = check_document(document, strict=strict)
    found = list(islice(chain(_wrong_schemas(document), _wrong_commands(document)), MOST))
    if strict:
        found += _against_schema(document, MOST)
    known = {each.path for each in checked.errors}
    errors = (*checked.errors, *(each for each in found if each.path not in known))
    if errors:
        return replace(checked, graph=None, plan=None, errors=errors)
    return checked


def load_file(path: str | Path, *, strict: bool = False) -> Checked:
    """Return the graph of a file and its plan; raise a ``GraphError`` with all errors if it has any."""
    checked = check_file(path, strict=strict)
    if checked.errors:
        raise GraphError(str(path), checked.errors, checked.more_errors)
    return checked


def _members(value: Json) -> Iterable[tuple[str | int, Json]]:
    """Return the members of an object, or the items of a list, as tasks, levels and gates stand in."""
    if isinstance(value, list | dict):
        return value.items() if isinstance(value, dict) else enumerate(value)
    return ()


def _wrong_commands(document: Document) -> Iterator[Problem]:
    """Yield the verifications and gates that the shell cannot read."""
    from maestro_hive.team.shell_syntax import unreadable

    commands = list(_commands(document.tree))
    wrong = unreadable(command for _, _, command in commands)
    for path, task, command in commands:
        if command in wrong:
            what = "gate" if task is None else "verification"
            yield Problem(
                code="not-executable",
                message=f"the shell cannot execute the {what}: {wrong[command]}",
                advice="correct it: 'sh -n' tries what a shell can read, and executes nothing",
                path=json_path(path),
                task=task,
                line=document.line(path),
            )


def _commands(tree: Json) -> Iterator[tuple[tuple[str | int, ...], str | None, str]]:
    """Yield the commands for the shell with their places and the task, which a gate has not."""
    if not isinstance(tree, dict):
        return
    for key, task in _members(tree.get("tasks")):
        check = task.get("verification") if isinstance(task, dict) else None
        at: tuple[str | int, ...] = ("tasks", key, "verification")
        if isinstance(check, dict):
            check, at = check.get("command"), (*at, "command")
        if isinstance(task, dict) and isinstance(check, str) and "\0" not in check:
            yield at, str(task.get("id", key)), check
    for key, level in _members(tree.get("levels")):
        gates = level.get("gates") if isinstance(level, dict) else None
        for number, gate in _members(gates):
            command = gate.get("command") if isinstance(gate, dict) else None
            if isinstance(command, str) and "\0" not in command:
                yield ("levels", key, "gates", number, "command"), None, command


def _wrong_schemas(document: Document) -> Iterator[Problem]:
    """Yield what is wrong with the JSON Schemas that tasks have for their results."""
    tasks = document.tree.get("tasks") if isinstance(document.tree, dict) else None
    found: dict[str, SchemaProblem | None] = {}  # many tasks may have the same one
    for key, task in _members(tasks):
        schema = task.get("output_schema") if isinstance(task, dict) else None
        if not isinstance(schema, dict):
            continue
        text = json.dumps(schema)
        if text not in found:
            found[text] = schema_problem(schema)
        wrong = found[text]
        if wrong is not None:
            path = ("tasks", key, "output_schema", *wrong.at)
            task_id = task.get("id", key)
            yield Problem(
                code="bad-schema",
                message=f"'output_schema' is no JSON Schema: {wrong.message}",
                advice="correct it: what the task returns is checked against it",
                path=json_path(path),
                task=task_id if isinstance(task_id, str) else None,
                line=document.line(path),
            )


def _contents(path: Path) -> bytes:
    try:
        return files.read_whole(path.resolve(), MAX_BYTES + 1)
    except DocumentCorruptError as error:
        raise StorageError(f"{path} is not read: {error.reason}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = files.reason_of(error) if isinstance(error, OSError) else str(error)
        raise StorageError(f"{path} could not be read: {reason}") from error


def _form(path: Path) -> Form | None:
    match path.suffix.lower():
        case ".toml":
            return "toml"
        case ".json":
            return "json"
        case _:
            return None


@cache
def _strict_validator() -> Draft7Validator:
    from jsonschema import Draft7Validator

    return Draft7Validator(load_schema("task_graph_strict"))


def _against_schema(document: Document, most: int) -> Iterator[Problem]:
    """Yield how a document differs from the published schema."""
    tasks = document.tree.get("tasks") if isinstance(document.tree, dict) else None
    for count, error in enumerate(_strict_validator().iter_errors(document.tree)):
        if count >= most:
            return
        path = tuple(error.absolute_path)
        task = None
        if len(path) > 1 and path[0] == "tasks" and isinstance(tasks, list):
            of = tasks[path[1]]
            task = of.get("id") if isinstance(of, dict) else None
        yield Problem(
            code="schema",
            message=f"the published schema has another rule: {error.message[:_SHOWN]}",
            advice=f"correct it, or leave --strict out (rule: {error.validator})",
            path=json_path(path),
            task=task if isinstance(task, str) else None,
            line=document.line(path),
        )


# --- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingProgram:
    """A program that verifications or gates name and that is not on PATH."""

    program: str
    #: Tasks and gates.
    needed_by: tuple[str, ...]


def missing_programs(graph: Graph) -> tuple[MissingProgram, ...]:
    """Return the programs of verifications and gates that are not on PATH.

    One that a task installs is listed as well.
    """
    return tuple(
        MissingProgram(program=program, needed_by=users)
        for program, users in needed_programs(graph).items()
        if shutil.which(program) is None
    )


# --- the example ----------------------------------------------------------------------------------


#: The persona of the example, and that of one which an agent executes.
_PERSONA = re.compile(r"^# This one is a script .*?^'''\]\n", re.DOTALL | re.MULTILINE)
_AGENT = """\
# It may write files here; without permissions its own settings hold, and most agents then write none.
[personas.developer]
agent = "{}"
permissions = "edit"
"""


def example(form: Form, agent: str | None = None) -> str:
    """Return a small graph to start from, executed by an agent if one is named; in TOML it has comments."""
    text = Path(__file__).with_name("templates").joinpath("task-graph.toml").read_text("utf-8")
    if agent is not None:
        text = _PERSONA.sub(_AGENT.format(agent), text)
    if form == "toml":
        return text
    tree = parse_document(text.encode(), "toml").tree
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def write_example(folder: Path, form: Form, agent: str | None = None) -> Path:
    """Write the example into a folder, which is created; an existing file is never replaced."""
    path = folder / f"{EXAMPLE_NAME}.{form}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_new(path, example(form, agent).encode())
    except FileExistsError:
        raise ConfigurationError(
            f"{path} exists, and is not replaced; move it away, or name another folder"
        ) from None
    except OSError as error:
        raise StorageError(f"{path} was not written: {files.reason_of(error)}") from error
    return path


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet; one that cannot be written to its end is removed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def write_picture(path: Path, picture: str) -> None:
    """Write a picture; it replaces an older one, and nothing else."""
    if path.suffix.lower() != ".svg":
        raise ConfigurationError(f"{path}: the name of a picture ends in .svg")
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        hint = "; create the folder first" if error.errno == errno.ENOENT else ""
        raise StorageError(f"{path} was not written: {files.reason_of(error)}{hint}") from error
