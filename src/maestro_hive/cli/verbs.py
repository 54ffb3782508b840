"""Every verb of ``maestro``, by section: known without loading what it needs.

The module named here has the verb as ``command``. The summary is written a second time as the
first line of its docstring, and a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """A verb, the module of this package that has it, and what it does in one line."""

    name: str
    module: str
    summary: str


SECTIONS: dict[str, tuple[Verb, ...]] = {
    "Runs": (
        Verb("runs", "runs", "List runs, newest first, and where they stand."),
        Verb("show", "show", "Show a run and its steps, or one step with all that is known of it."),
        Verb("events", "events", "Tell what happened in a run, or what happens now."),
        Verb("answer", "answering", "Answer what a run waits for."),
        Verb("retry", "retrying", "Let what failed in a run be tried again."),
        Verb("cancel", "cancelling", "End a run, and what it started."),
        Verb("fork", "forking", "Begin a new run with what another has kept."),
        Verb("export", "exporting", "Write a run to one file, to be imported elsewhere."),
        Verb("import", "importing", "Take a run in from a file that export wrote."),
    ),
    "What runs share": (
        Verb("breakers", "breakers", "Show the circuit breakers; open or reset one."),
    ),
    "Checkpoints and copies": (
        Verb("checkpoints", "checkpoints", "List, check, compare and restore checkpoints."),
        Verb("backup", "backup", "Copy a state folder, in use or not, to a new folder."),
    ),
    "The state folder": (
        Verb("doctor", "doctor", "Examine a state folder, say what is wrong, and mend it."),
        Verb("gc", "gc", "Delete what nothing needs any more."),
        Verb("purge", "purge", "Forget runs wholly: journal, copies and checkpoints."),
    ),
    "The shell": (Verb("completion", "completion", "Print the completion script for a shell."),),
}

VERBS: dict[str, Verb] = {verb.name: verb for section in SECTIONS.values() for verb in section}
