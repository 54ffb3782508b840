"""``maestro checkpoints``: what a run was at a moment, to be looked at, compared and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.call import require_folder
from maestro_hive.cli.completion import checkpoint_ids, run_ids
from maestro_hive.cli.endings import FAILED
from maestro_hive.cli.frame import sub_verb, verb_group
from maestro_hive.cli.screen import Styled

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call
    from maestro_hive.cli.checkpoint_files import CheckpointFile

_SIGNS = {"added": Styled("+", "green"), "removed": Styled("-", "red")}
_CHANGED = Styled("~", "yellow")
#: Names that are said one by one before the rest is counted.
_SAID = 12

_RUN_OPTION = click.option(
    "--run", metavar="RUN", shell_complete=run_ids, help="The run, where several have such an id."
)


@verb_group(
    "checkpoints",
    examples="""
    maestro checkpoints list checkout-42
    maestro checkpoints verify                        are all of them whole?
    maestro checkpoints diff before-deploy after
    maestro checkpoints restore checkout-42 before-deploy
    """,
)
def command(_: Call) -> None:
    """List, check, compare and restore checkpoints.

    A checkpoint is a run's whole state at one moment, in a JSON file that proves itself by a
    SHA-256. They lie in the folder "checkpoints" of the state folder, or in MAESTRO_CHECKPOINT_DIR.
    """


@sub_verb(
    command,
    "list",
    examples="""
    maestro checkpoints list                  of all runs
    maestro checkpoints list checkout-42      of one, the newest first
    """,
    reads=True,
)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
def list_checkpoints(call: Call, run: str | None) -> None:
    """List checkpoints, the newest of each run first.

    They are not read for that: see verify.
    """
    found = _there(call, run)
    if call.wants_json:
        call.answer(checkpoints=[each.facts() for each in found])
        return
    screen.table(
        ["id", "run", "made", "size"],
        [[each.id, each.run, each.created_at(), words.size(each.size() or 0)] for each in found],
        empty=f"there are no checkpoints{f' of run {run!r}' if run else ''}",
    )


def _there(call: Call, run: str | None) -> list[CheckpointFile]:
    from maestro_hive.cli.checkpoint_files import all_checkpoints  # noqa: PLC0415 - not for --help

    require_folder(call.folder)
    return list(all_checkpoints(call.checkpoint_folders, run))


def _found(call: Call, checkpoint_id: str, run: str | None) -> CheckpointFile:
    from maestro_hive.cli.checkpoint_files import find  # noqa: PLC0415 - as above

    require_folder(call.folder)
    return find(call.checkpoint_folders, checkpoint_id, run)


def _contents(checkpoint: CheckpointFile) -> dict[str, Any]:
    """Return a checkpoint as people see it: a run with its steps, or the data somebody put in."""
    from maestro_hive.cli.checkpoint_files import run_of  # noqa: PLC0415 - as above

    body = checkpoint.read()
    copy = checkpoint.run_copy(body)
    return run_of(copy)[1] if copy else dict(body["state"])


@sub_verb(
    command,
    "show",
    examples="""
    maestro checkpoints show before-deploy
    maestro checkpoints show before-deploy --run checkout-42 --json
    """,
    reads=True,
)
@click.argument("checkpoint_id", metavar="ID", shell_complete=checkpoint_ids)
@_RUN_OPTION
def show(call: Call, checkpoint_id: str, run: str | None) -> None:
    """Show what a checkpoint holds: the run's fields, its steps and memories.

    It is checked first; a damaged one is named and not shown.
    """
    checkpoint = _found(call, checkpoint_id, run)
    contents = _contents(checkpoint)
    if call.wants_json:
        call.answer(checkpoint={**checkpoint.facts(), "contents": contents})
        return
    steps = contents.pop("steps", [])
    for name, value in contents.items():
        if value not in ({}, [], None):
            screen.line(f"{name:16}{_in_short(value)}")
    if steps:
        screen.line()
    screen.table(
        ["step", "persona", "status", "attempts", "output"],
        [
            [
                str(step.get("name") or step["step"]),
                step.get("persona"),
                step["status"],
                step["attempts"],
                None if step["output"] is None else _in_short(step["output"]),
            ]
            for step in steps
        ],
    )


def _in_short(value: Any, most: int = 200) -> str:
    text = value if isinstance(value, str) else screen.to_json(value)
    text = words.in_one_line(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


@sub_verb(
    command,
    "verify",
    examples="""
    maestro checkpoints verify
    maestro checkpoints verify checkout-42 && echo all of them are whole
    """,
    reads=True,
)
@click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)
def verify(call: Call, run: str | None) -> int | None:
    """Read checkpoints and check that each is exactly what was written.

    Exits with 1 if one is damaged. Nothing is moved or mended.
    """
    verdicts = [(each, each.damage()) for each in _there(call, run)]
    damaged = sum(trouble is not None for _, trouble in verdicts)
    if call.wants_json:
        found = [{**each.facts(), "damage": trouble} for each, trouble in verdicts]
        call.answer(checkpoints=found, damaged=damaged)
        return FAILED if damaged else None
    screen.table(
        ["id", "run", "verdict", "why"],
        [
            [
                each.id,
                each.run,
                Styled("damaged", "red") if trouble else Styled("whole", "green"),
                trouble,
            ]
            for each, trouble in verdicts
        ],
        empty=f"there are no checkpoints{f' of run {run!r}' if run else ''}",
    )
    if damaged:
        screen.note(f"{words.many(damaged, 'checkpoint')} of {len(verdicts)} cannot be trusted")
        return FAILED
    return None


@sub_verb(
    command,
    "diff",
    examples="""
    maestro checkpoints diff before-deploy after-deploy
    maestro checkpoints diff a b --run checkout-42 --json
    """,
    reads=True,
)
@click.argument("first", metavar="ID1", shell_complete=checkpoint_ids)
@click.argument("second", metavar="ID2", shell_complete=checkpoint_ids)
@_RUN_OPTION
def diff(call: Call, first: str, second: str, run: str | None) -> None:
    """Say what was added, removed and changed from one checkpoint to another.

    Fields, steps and what personas remember are compared, one line for each difference.
    """
    from maestro_hive.cli.checkpoint_diff import differences  # noqa: PLC0415 - as above

    before, after = (_contents(_found(call, each, run)) for each in (first, second))
    found = differences(before, after)
    if call.wants_json:
        call.answer(first=first, second=second, differences=[each.as_json() for each in found])
        return
    screen.table(
        ["", "what", "name", "before", "after"],
        [
            [
                _SIGNS.get(each.change, _CHANGED),
                each.part,
                each.name,
                None if each.change == "added" else _in_short(each.before, 60),
                None if each.change == "removed" else _in_short(each.after, 60),
            ]
            for each in found
        ],
        empty="they are the same",
    )


@sub_verb(
    command,
    "restore",
    examples="""
    maestro checkpoints restore checkout-42 before-deploy
    maestro checkpoints restore checkout-42 before-deploy --yes    without being asked
    """,
)
@click.argument("run", metavar="RUN", shell_complete=run_ids)
@click.argument("checkpoint_id", metavar="ID", shell_complete=checkpoint_ids)
@click.option("--yes", is_flag=True, help="Do not ask.")
def restore(call: Call, run: str, checkpoint_id: str, *, yes: bool) -> None:
    """Take a run back to a checkpoint.

    What will run again is said first, and you are asked. A run that a process executes is refused,
    and the process is named. What came after the checkpoint stays in the journal, and no longer
    counts.
    """
    from maestro_hive.cli.restoring import Restoring  # noqa: PLC0415 - as above

    checkpoint = _found(call, checkpoint_id, run)
    with call.opened() as store, Restoring(store, checkpoint) as restoring:
        again = restoring.will_run_again()
        screen.line(f"run {run!r} goes back to {_when(checkpoint)}")
        screen.line(f"steps that are kept now and will run again: {_listed(again)}")
        call.agreed("Restore it?", yes=yes)
        restoring.restore()
    screen.line("restored; execute the run to go on from there")


def _when(checkpoint: CheckpointFile) -> str:
    made = checkpoint.created_at()
    return (
        f"checkpoint {checkpoint.id!r}{f', made at {made:%Y-%m-%d %H:%M:%S} UTC' if made else ''}"
    )


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    rest = len(names) - _SAID
    return f"{len(names)} ({', '.join(names[:_SAID])}{f' and {rest} more' if rest > 0 else ''})"
