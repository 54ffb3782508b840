"""``maestro checkpoints``: the state of a run at one moment, shown, compared and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.admin import checkpoints as admin
from maestro_hive.admin.runs import find_run
from maestro_hive.cli import output
from maestro_hive.cli.command import FAILED, checkpoint_ids, run_ids, verb, verb_group
from maestro_hive.cli.output import Styled
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from maestro_hive.cli.command import Call

_SIGNS = {"added": Styled("+", "green"), "removed": Styled("-", "red")}
_CHANGED = Styled("~", "yellow")
#: Names that are listed before the rest is counted.
_LISTED = 12

_RUN_OPTION = click.option(
    "--run", metavar="RUN", shell_complete=run_ids, help="The run, if several have such an id."
)
_RUN_ARGUMENT = click.argument("run", metavar="[RUN]", required=False, shell_complete=run_ids)


@verb_group("checkpoints")
def checkpoints_command(_: Call) -> None:
    """List, verify, compare and restore checkpoints.

    A checkpoint is the whole state of a run at one moment, in a JSON file with a SHA-256. They are
    in the folder "checkpoints" of the state folder, or in MAESTRO_CHECKPOINT_DIR.

    Examples:
        maestro checkpoints list checkout-42
        maestro checkpoints verify                        are all of them valid?
        maestro checkpoints diff before-deploy after
        maestro checkpoints restore checkout-42 before-deploy
    """


@verb("list", group=checkpoints_command, reads=True)
@_RUN_ARGUMENT
def list_checkpoints(call: Call, run: str | None) -> None:
    """List checkpoints, the newest of each run first.

    They are not read for that: see verify.

    Examples:
        maestro checkpoints list                  of all runs
        maestro checkpoints list checkout-42      of one, the newest first
    """
    found = admin.list_checkpoints(call.folder, run)
    if call.wants_json:
        call.print_json(checkpoints=[to_dict(each) for each in found])
        return
    output.table(
        ["id", "run", "made", "size"],
        [[each.id, each.run, each.created_at, output.size(each.bytes or 0)] for each in found],
        empty=_none(run),
    )


def _none(run: str | None) -> str:
    return f"there are no checkpoints{f' of run {run!r}' if run else ''}"


@verb("show", group=checkpoints_command, reads=True)
@click.argument("checkpoint_id", metavar="ID", shell_complete=checkpoint_ids)
@_RUN_OPTION
def show(call: Call, checkpoint_id: str, run: str | None) -> None:
    """Show the content of a checkpoint: the run's fields, its steps and memories.

    It is verified first; a damaged one is named and not shown.

    Examples:
        maestro checkpoints show before-deploy
        maestro checkpoints show before-deploy --run checkout-42 --json
    """
    checkpoint = admin.find_checkpoint(call.folder, checkpoint_id, run)
    contents = checkpoint.contents()
    if call.wants_json:
        call.print_json(checkpoint={**to_dict(checkpoint), "contents": contents})
        return
    steps = contents.pop("steps", [])
    for name, value in contents.items():
        if value not in ({}, [], None):
            output.line(f"{name:16}{_short(value)}")
    if steps:
        output.line()
    output.table(
        ["step", "persona", "status", "attempts", "output"],
        [
            [
                str(step.get("name") or step["step"]),
                step.get("persona"),
                step["status"],
                step["attempts"],
                None if step["output"] is None else _short(step["output"]),
            ]
            for step in steps
        ],
    )


def _short(value: object, most: int = 200) -> str:
    text = value if isinstance(value, str) else output.to_json(value)
    return output.shortened(output.in_one_line(text), most) or ""


@verb("verify", group=checkpoints_command, reads=True)
@_RUN_ARGUMENT
def verify(call: Call, run: str | None) -> int | None:
    """Read checkpoints and verify that each is exactly what was written.

    Exits with 1 if one is damaged. Nothing is moved or repaired.

    Examples:
        maestro checkpoints verify
        maestro checkpoints verify checkout-42 && echo all of them are valid
    """
    verified = [(each, each.damage()) for each in admin.list_checkpoints(call.folder, run)]
    if run is not None and not verified:
        with call.reading() as reader:  # an error names similar ones
            find_run(reader, run)
    damaged = sum(problem is not None for _, problem in verified)
    if call.wants_json:
        found = [{**to_dict(each), "damage": problem} for each, problem in verified]
        call.print_json(checkpoints=found, damaged=damaged)
        return FAILED if damaged else None
    output.table(
        ["id", "run", "result", "why"],
        [
            [
                each.id,
                each.run,
                Styled("damaged", "red") if problem else Styled("valid", "green"),
                problem,
            ]
            for each, problem in verified
        ],
        empty=_none(run),
    )
    if damaged:
        output.note(f"{output.many(damaged, 'checkpoint')} of {len(verified)} cannot be trusted")
        return FAILED
    return None


@verb("diff", group=checkpoints_command, reads=True)
@click.argument("first", metavar="ID1", shell_complete=checkpoint_ids)
@click.argument("second", metavar="ID2", shell_complete=checkpoint_ids)
@_RUN_OPTION
def diff(call: Call, first: str, second: str, run: str | None) -> None:
    """Show what was added, removed and changed from one checkpoint to another.

    Fields, steps and memories are compared, one line for each difference.

    Examples:
        maestro checkpoints diff before-deploy after-deploy
        maestro checkpoints diff a b --run checkout-42 --json
    """
    found = admin.diff_checkpoints(call.folder, first, second, run)
    if call.wants_json:
        call.print_json(first=first, second=second, differences=[each._asdict() for each in found])
        return
    output.table(
        ["", "what", "name", "before", "after"],
        [
            [
                _SIGNS.get(each.change, _CHANGED),
                each.part,
                each.name,
                None if each.change == "added" else _short(each.before, 60),
                None if each.change == "removed" else _short(each.after, 60),
            ]
            for each in found
        ],
        empty="they are the same",
    )


@verb("restore", group=checkpoints_command)
@click.argument("run", metavar="RUN", shell_complete=run_ids)
@click.argument("checkpoint_id", metavar="ID", shell_complete=checkpoint_ids)
@click.option("--yes", is_flag=True, help="Do not ask.")
def restore(call: Call, run: str, checkpoint_id: str, *, yes: bool) -> None:
    """Restore a run from a checkpoint.

    What will run again is printed first, and you are asked. A run that a process executes is
    refused, and the process is named. Entries after the checkpoint stay in the journal, and no
    longer count.

    Examples:
        maestro checkpoints restore checkout-42 before-deploy
        maestro checkpoints restore checkout-42 before-deploy --yes    without asking
    """
    checkpoint = admin.find_checkpoint(call.folder, checkpoint_id, run)
    with call.writing() as store, admin.Restore(store, call.folder, checkpoint) as restoring:
        again = restoring.will_run_again()
        made = checkpoint.created_at
        when = f", made at {made:%Y-%m-%d %H:%M:%S} UTC" if made else ""
        output.line(f"run {run!r} is restored from checkpoint {checkpoint.id!r}{when}")
        names = f"{len(again)} ({output.listed(again, _LISTED)})" if again else "none"
        output.line(f"steps that are completed now and will run again: {names}")
        call.confirm("Restore it?", yes=yes)
        restoring.restore()
    output.line("restored; start its program to resume it from there")
