"""``docs/reference/api.md``: every public name, what it promises, and how it is used."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from docs.generate import sources
from maestro_hive.engine.options import CallOptions, Options, StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """\
# The public names, and what each promises

A name that is not here is not public. This page is made from the code by `make docs`, and a test
compares the two. The command line has [a page of its own](cli.md), and so have
[the events of a run](events.md).
"""

#: The modules with public names, as people meet them, and what is to be said of each.
MODULES = {
    "maestro_hive": "Loaded when first used, so that `import maestro_hive` costs next to nothing.",
    "maestro_hive.hive": "What a user writes: steps, workflows and runs.",
    "maestro_hive.unified_execution": (
        "The engine below: level 1, a persona's attempts; level 2, rounds around them; state and"
        " settings. It can be used directly, on the same folder."
    ),
    "maestro_hive.core.state_manager": "Values that all processes on a folder share.",
    "maestro_hive.core.self_reflection.self_healing_engine": (
        "Healing between attempts: give a `SelfHealingEngine`, or an engine of your own, to"
        " `PersonaExecutor(healing_engine=…)` or `Hive(healing_engine=…)`."
    ),
    "maestro_hive.core.self_reflection.failure_detector": (
        "Failures in the output of pytest, in its JSON report, in logs and in recorded executions."
    ),
    "maestro_hive.maestro.state.checkpoint": "A run's state as JSON files that prove themselves.",
    "maestro_hive.kernel.errors": (
        "Facts are attributes; the message says what happened, to which thing, and what to do."
    ),
    "maestro_hive.team.runner": (
        "Executes task graphs in a program: [how to use it](../howto/run-a-task-graph.md#in-a-program)."
    ),
    "maestro_hive.team.personas": "What a persona that is a Python function is called with.",
    "maestro_hive.team.progress": "What such a function raises when its context is nearly full.",
    "maestro_hive.team.graph": (
        "Task graphs that are checked, from bytes: [how to write them](../howto/task-graphs.md)."
    ),
    "maestro_hive.team.graph_files": "Task graphs that are checked, from files.",
    "maestro_hive.testing": (
        "For your own tests: [how to use it](../howto/test-your-workflow.md). The pytest plugin has"
        " the fixtures `hive_kit`, a `Kit`, and `hive`, its Hive."
    ),
}

#: Modules that offer what they define, without a list of it.
_WHOLE = ("maestro_hive.maestro.state.checkpoint", "maestro_hive.kernel.errors")

#: The public names of modules that have others for the command.
_CHOSEN = {
    "maestro_hive.team.runner": ["TeamRunner"],
    "maestro_hive.team.personas": ["Assignment"],
    "maestro_hive.team.progress": ["ContextFull"],
    "maestro_hive.team.graph": ["check_graph", "Checked", "GraphError", "Problem"],
    "maestro_hive.team.graph_files": ["load_file", "check_file"],
}
#: The public methods of classes that have others for the command.
_METHODS = {"TeamRunner": ("run", "resume")}

#: What is handed to users, and not made by them.
_NOT_MADE = {
    *("Assignment", "Checked", "GraphError", "Problem"),
    *("Call", "CrashDifferenceError", "CrashReport", "Kit", "Question", "RunHandle", "RunInfo"),
    *("StandIn", "StepContext", "StepFunction", "Worker", "WorkflowFunction"),
}

#: Where the tree of a module's errors is drawn.
_DRAWN = {
    "maestro_hive.hive": "maestro_hive.hive.errors",
    "maestro_hive.kernel.errors": "maestro_hive.kernel.errors",
}

#: What the texts that are public names mean.
_TEXTS = {
    "__version__": "The version, as a text.",
    "DEFAULT_STATE_PATH": "Where state is kept if nobody says otherwise: `/var/maestro/state`.",
    "DEFAULT_CHECKPOINT_PATH": "The same for checkpoints: `/var/maestro/checkpoints`.",
}


def names(module: str) -> list[str]:
    """Return the public names of a module."""
    if module in _CHOSEN:
        return list(_CHOSEN[module])
    home = import_module(module)
    if module not in _WHOLE:
        return list(home.__all__)
    return [
        name
        for name, each in vars(home).items()
        if inspect.isclass(each) and each.__module__ == module and not name.startswith("_")
    ]


def write() -> str:
    """Return the page."""
    links = _links()
    return _HEAD + "".join(_section(module, links) for module in MODULES)


def promise(module: str, name: str) -> str:
    """Return what a name promises, in the first line of its docstring."""
    thing = getattr(import_module(module), name)
    text = _TEXTS[name] if isinstance(thing, str) else sources.documentation(thing)
    return " ".join(text.partition("\n\n")[0].split())


# --- which name is described where ----------------------------------------------------------------


def _homes() -> dict[str, list[str]]:
    """Return, for each module, the names that are described there: each thing once."""
    described: list[Any] = []
    homes: dict[str, list[str]] = {}
    for module in [*list(MODULES)[1:], "maestro_hive"]:
        own = []
        for name in names(module):
            thing = getattr(import_module(module), name)
            if not isinstance(thing, str) and not any(thing is each for each in described):
                described.append(thing)
                own.append(name)
        homes[module] = own
    return homes


@cache
def _public_classes() -> frozenset[type]:
    found = (getattr(import_module(module), name) for module in MODULES for name in names(module))
    return frozenset(each for each in found if inspect.isclass(each))


def _links() -> dict[int, str]:
    """Return the anchor of every thing that is described, by the thing's identity."""
    homes, seen = _homes(), Counter[str]()
    links = {}
    for module in MODULES:
        seen[_slug(module)] += 1
        for name in homes[module]:
            slug = _slug(name)
            links[id(getattr(import_module(module), name))] = (
                f"{slug}-{seen[slug]}" if seen[slug] else slug
            )
            seen[slug] += 1
    return links


def _slug(heading: str) -> str:
    """Return the anchor that a heading gets where Markdown is shown."""
    return re.sub(r"[^\w-]", "", heading.lower())


# --- how it is written ----------------------------------------------------------------------------


def _section(module: str, links: dict[int, str]) -> str:
    lines = [f"\n## `{module}`\n", f"{MODULES[module]}\n"]
    if module in _DRAWN:
        lines.append(f"{_drawing(_DRAWN[module])}\n")
    for name in names(module):
        anchor = links.get(id(getattr(import_module(module), name)))
        shown = f"[`{name}`](#{anchor})" if anchor else f"`{name}`"
        lines.append(f"- {shown}: {promise(module, name)}")
    described = "".join(_entry(module, name) for name in _homes()[module])
    return "\n".join(lines) + "\n" + described


def _drawing(module: str) -> str:
    """Return the tree of errors that a module draws in its docstring."""
    paragraphs = sources.documentation(import_module(module)).split("\n\n")
    return next(each for each in paragraphs if "├──" in each)


def _entry(module: str, name: str) -> str:
    thing = getattr(import_module(module), name)
    return "".join(f"\n{part}\n" for part in _parts(name, thing))


def _parts(name: str, thing: Any) -> Iterator[str]:
    yield f"### `{name}`"
    if inspect.isclass(thing):
        made = None if name in _NOT_MADE else sources.constructor(thing)
        if made:
            yield f"```python\n{made}\n```"
        yield sources.documentation(thing)
        fields = "\n".join(_item(each.text, each.promise) for each in _attributes(thing))
        if fields:
            yield fields
        public = _METHODS.get(name)
        for method in sources.methods(thing, _public_classes()):
            if public is not None and method.name not in public:
                continue
            yield f"```python\n{method.text}\n```"
            yield method.promise
    else:
        node = sources.definition(thing)
        assert isinstance(node, sources.Function)
        yield f"```python\n{sources.signature(node, name)}\n```"
        yield sources.documentation(thing)


def _attributes(thing: type) -> list[sources.Attribute]:
    """Return the attributes of a class; ``Options`` says what an option means, whoever takes it."""
    found = sources.attributes(thing)
    if thing not in (StepOptions, CallOptions):
        return found
    options = {each.name: each for each in sources.attributes(Options)}
    return [replace(each, promise=options[each.name].promise) for each in found]


def _item(text: str, said: str) -> str:
    return f"- `{text}`{f': {_continued(said)}' if said else ''}"


def _continued(text: str) -> str:
    return textwrap.indent(text, "  ").strip()
