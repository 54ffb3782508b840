"""Imports a state file of MAHABHARATHA: it becomes a team run, which is resumed like any other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.graph import GraphError
from maestro_hive.team.graph_files import check_file
from maestro_hive.team.mahabharatha import read_foreign
from maestro_hive.team.restoring import FOLDER, is_other_graph
from maestro_hive.team.runner import TeamRunner

if TYPE_CHECKING:
    from maestro_hive.team.graph import Graph

_NAME = re.compile(r"[\w][\w. -]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedState:
    """A team run that was made of a state file."""

    run_id: str
    feature: str
    #: The file of its graph.
    graph: Path
    tasks: int
    #: The tasks that are taken as complete, and those that are complete in the file and executed again.
    complete: tuple[str, ...]
    again: tuple[str, ...]
    #: Whether all tasks have a persona: else the graph has to be executed with one.
    has_personas: bool


def import_state(
    folder: Path, data: bytes, path: Path, *, graph: Path | None = None, run_id: str | None = None
) -> ImportedState:
    """Make a team run of a state, in the current folder; nothing is made if something is wrong."""
    here = Path.cwd().absolute()
    given = None if graph is None else _graph(graph)
    found = read_foreign(data, path, None if given is None else given.feature)
    where = graph or _graph_of(found.feature, here)
    made = given or _graph(where)
    if is_other_graph(found, made):
        raise ConfigurationError(
            f"{path} is of the feature {found.feature!r}, and {where} of {made.feature!r}; their tasks must"
            " be the same ones: give the graph that belongs to the state with --graph"
        )
    with Hive(folder) as hive:
        runner = TeamRunner(hive)
        chosen = run_id or runner.choose(made, here, force=True).run_id
        complete = runner.restore(chosen, made, here, found)
    return ImportedState(
        run_id=chosen,
        feature=made.feature,
        graph=where,
        tasks=len(made.tasks),
        complete=tuple(complete),
        again=tuple(sorted(found.tasks.keys() - complete)),
        has_personas=all(made.persona_of(task) is not None for task in made.tasks),
    )


def _graph(path: Path) -> Graph:
    checked = check_file(path)
    if checked.graph is None:
        raise GraphError(str(path), checked.errors, checked.more_errors)
    return checked.graph


def _graph_of(feature: str, here: Path) -> Path:
    """Return the file that MAHABHARATHA has the graph of a feature in."""
    if _NAME.fullmatch(feature):
        for specs in (here / ".gsd" / "specs", here / FOLDER / "specs"):
            path = specs / feature / "task-graph.json"
            if path.is_file():
                return path
    raise ConfigurationError(
        f"the graph of the feature {feature!r} is not in {here / '.gsd' / 'specs'}; give its file with"
        " --graph"
    )
