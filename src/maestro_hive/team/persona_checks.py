"""Whether the tasks of a graph can be executed: their personas are looked at before anything starts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.agents import adapter
from maestro_hive.team.results import check_schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.team.graph import Graph, Task
    from maestro_hive.team.graph.records import Origin
    from maestro_hive.team.personas import Assignment

#: How many tasks an error names.
_NAMED = 8


class Refused(NamedTuple):
    """Why some tasks cannot be executed."""

    reason: str
    tasks: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.tasks) - _NAMED
        named = ", ".join(self.tasks[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
        return f"{named}: {self.reason}"


def check_personas(graph: Graph, folder: Path) -> dict[str, Callable[[Assignment], Any]]:
    """Return the functions of Python personas, by name; raise if a task could not be executed.

    All that is wrong is named at once, before anything has started.
    """
    functions, refused = functions_of(graph, folder)
    if refused:
        lines = "\n".join(f"  {each}" for each in refused)
        raise ConfigurationError(f"nothing was started: tasks cannot be executed:\n{lines}")
    return functions


def functions_of(
    graph: Graph, folder: Path
) -> tuple[dict[str, Callable[[Assignment], Any]], tuple[Refused, ...]]:
    """Return the functions of Python personas, by name, and which tasks could not be executed.

    Modules of Python personas are imported.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"nothing was started: the folder of the run, {folder}, is not there; move it back, or"
            " start the graph where it is now"
        )
    functions: dict[str, Callable[[Assignment], Any]] = {}
    wrong: dict[str, list[str]] = {}
    # Many tasks may have the same schema, and the same persona.
    known: dict[object, str | None] = {}

    def reason(key: object, check: Callable[[], object]) -> str | None:
        if key not in known:
            known[key] = _refusal(check)
        return known[key]

    for task in graph.tasks:
        schema = task.output_schema
        found = None
        if schema is not None:
            found = reason(("schema", json.dumps(schema)), partial(check_schema, schema))
        if found is None:
            work = partial(_check_persona_of, task, graph, folder, functions)
            found = reason(("persona", _who(task)), work)
        if found is not None:
            wrong.setdefault(found, []).append(task.id)
    return functions, tuple(Refused(reason, tuple(ids)) for reason, ids in wrong.items())


def _who(task: Task) -> str | int | None:
    """Return what tells the persona of a task from others: its name, if it has one."""
    chosen = task.persona
    return chosen if isinstance(chosen, str | None) else id(chosen)


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ConfigurationError as error:
        return str(error)
    return None


def _no_persona(origin: Origin | None) -> str:
    is_toml = origin is not None and origin.form == "toml"
    shown = 'persona = { command = "…" } at its top' if is_toml else '"persona": {"command": "…"}'
    return f"no persona; give the graph one, as {shown}, or use --persona"


def _check_persona_of(
    task: Task, graph: Graph, folder: Path, functions: dict[str, Callable[[Assignment], Any]]
) -> None:
    persona = graph.persona_of(task)
    if persona is None:
        raise ConfigurationError(_no_persona(graph.origin))
    if persona.agent is not None:
        if shutil.which(persona.agent) is None:
            how = adapter(persona.agent).install
            raise ConfigurationError(
                f"the agent {persona.agent!r} is not installed, or not on PATH; install it: {how}"
            )
    elif persona.python is not None:
        if persona.python not in functions:
            functions[persona.python] = load_function(persona.python, folder)
    else:
        _check_program((persona.command or ("",))[0], folder, graph.origin)


def _check_program(program: str, folder: Path, origin: Origin | None) -> None:
    if "/" not in program:
        if shutil.which(program) is None:
            raise ConfigurationError(f"the program {program!r} is not on PATH")
        return
    path = folder / program
    if not path.is_file():
        raise ConfigurationError(_not_there(program, folder, origin))
    if not os.access(path, os.X_OK):
        raise ConfigurationError(f"the program {program!r} is not executable; chmod +x makes it so")


def _not_there(program: str, folder: Path, origin: Origin | None) -> str:
    said = f"the program {program!r} is not there"
    if program.startswith("/"):
        return said
    said += f", in {folder}, where the tasks are executed"
    if origin is not None and origin.file is not None:
        graph_folder = Path(origin.file).parent.resolve()
        if (graph_folder / program).is_file():
            said += f"; it is in {graph_folder}: run the graph from there"
    return said


def import_functions(graph: Graph, folder: Path) -> None:
    """Import the modules of Python personas in this thread, which some need to be the main one.

    ``check_personas``, which may be called in another one, says what is wrong with them.
    """
    one_of_each = {_who(task): task for task in graph.tasks}
    for persona in map(graph.persona_of, one_of_each.values()):
        if persona is not None and persona.python is not None:
            _refusal(partial(load_function, persona.python, folder))


def load_function(name: str, folder: Path) -> Callable[[Assignment], Any]:
    """Return a function by ``package.module:name``; modules in the folder of the run come first."""
    module_name, _, path = name.partition(":")
    if sys.path[:1] != [str(folder)]:
        sys.path[:] = [str(folder), *(each for each in sys.path if each != str(folder))]
    _check_imported(module_name, folder)
    try:
        found: Any = import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the function {name} was not found: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"the module of {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    _check_imported(module_name, folder)  # a package of another folder may have had it
    if not callable(found):
        raise ConfigurationError(f"{name} is a {type(found).__name__}, and no function")
    function: Callable[[Assignment], Any] = found
    return function


def _check_imported(name: str, folder: Path) -> None:
    """Raise if the folder has a module by a name under which this process has imported another one."""
    package = ""
    for part in name.split("."):
        package = f"{package}.{part}".lstrip(".")
        imported = sys.modules.get(package)
        place = folder.joinpath(*package.split("."))
        files = (place / "__init__.py", place.with_suffix(".py"))
        own = next((each for each in files if each.is_file()), None)
        if imported is None or own is None:
            continue
        file = getattr(imported, "__file__", None)
        if file is None or os.path.realpath(file) != os.path.realpath(own):
            where = "has no file" if file is None else f"was imported from {file}"
            raise ConfigurationError(
                f"the module {package!r} of this process {where}, so that {own} cannot be imported;"
                " rename it, or execute the run in a process of its own"
            )
