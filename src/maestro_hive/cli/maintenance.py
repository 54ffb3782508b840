"""``maestro doctor``, ``gc``, ``purge``, ``backup``, ``export``, ``import``: the state folder."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maestro_hive.admin import doctor
from maestro_hive.admin.purge import collect_garbage, find_garbage, plan_purge, purge_runs
from maestro_hive.admin.transfer import (
    back_up,
    check_target,
    export_run,
    import_run,
    spool,
    write_export,
)
from maestro_hive.cli import output
from maestro_hive.cli.command import FAILED, duration, run_ids, verb
from maestro_hive.cli.output import complain
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.redaction import REDACTED
from maestro_hive.maestro.state.plain import to_dict
from maestro_hive.maestro.state.run_document import MAX_DOCUMENT_BYTES
from maestro_hive.team.state import MAX_STATE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.admin.doctor import Findings
    from maestro_hive.admin.purge import PurgePlan
    from maestro_hive.cli.command import Call

#: Names that are listed before the rest is counted.
_LISTED = 10


@verb("doctor", reads=True)
@click.option("--fix", is_flag=True, help="Repair what can be repaired; nothing in use is deleted.")
def doctor_command(call: Call, *, fix: bool) -> int | None:
    """Examine a state folder, and repair it.

    Reads everything: every page, value, document and checkpoint; also the permissions of files, the
    leases of runs, and the free space of the disk. Exits with 1 if there is a problem. A folder
    that cannot be written, or whose disk is full, is examined all the same.

    Examples:
        maestro doctor                    is everything valid? what would be repaired?
        maestro doctor --fix              repair it
        maestro doctor --json | jq .problems
    """
    found = doctor.repair(call.folder) if fix else doctor.examine(call.folder)
    if call.wants_json:
        facts = to_dict(found)
        call.print_json(**facts.pop("versions"), **facts)
    else:
        _print_findings(found)
    return FAILED if found.problems else None


def _print_findings(found: Findings) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    _print_fact("state folder", str(found.folder))
    _print_fact("format", f"{found.format}, {versions}")
    used, free = output.size(found.journal_bytes), output.size(found.free_bytes)
    _print_fact("disk", f"{used} used, {free} free")
    _print_fact("runs", str(found.runs))
    for held in found.held:
        since = f"{held.since:%Y-%m-%d %H:%M:%S} UTC"
        _print_fact("held", f"{held.name} by process {held.pid} on {held.host} since {since}")
    for run in found.unfinished[:_LISTED]:
        _print_fact("not finished", f"{run.run} ({run.status}): no process executes it")
    if len(found.unfinished) > _LISTED:
        _print_fact("not finished", f"and {len(found.unfinished) - _LISTED:,} more runs")
    for name, texts in (
        ("repaired", found.repaired),
        ("warning", found.warnings),
        ("problem", found.problems),
        ("--fix would", found.repairs),
    ):
        for text in texts:
            _print_fact(name, text)
    output.line("there are problems" if found.problems else "everything that was checked is valid")


def _print_fact(name: str, text: str) -> None:
    output.line(f"{name:14}{output.in_one_line(text)}")


@verb("gc", reads=True)
@click.option(
    "--keep", metavar="N", type=click.IntRange(min=1), help="Checkpoints to keep per run."
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
def gc_command(call: Call, keep: int | None, *, dry_run: bool) -> None:
    """Delete what nothing refers to.

    Stored values that no step refers to, checkpoints that have expired, and files that killed
    processes left half-written. No run loses anything that it would be resumed from. The journal
    keeps its size: the space inside it is used again.

    Examples:
        maestro gc --dry-run      what would be deleted
        maestro gc                values nothing refers to, and checkpoints that have expired
        maestro gc --keep 3       also all but the three newest checkpoints of each run
    """
    found = (find_garbage if dry_run else collect_garbage)(call.folder, keep=keep)
    if call.wants_json:
        call.print_json(dry_run=dry_run, **to_dict(found))
        return
    output.line(
        f"{'would delete' if dry_run else 'deleted'} {output.many(found.values, 'stored value')}"
        f" ({output.size(found.bytes)}), {output.many(found.checkpoints, 'checkpoint')},"
        f" {output.many(found.leftovers, 'leftover file')}"
    )


@verb("purge")
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=run_ids)
@click.option(
    "--older-than",
    type=duration,
    help="Runs for which nothing was recorded for so long: 12h, 30d.",
)
@click.option("--status", "statuses", multiple=True, help="Runs of this status; may be repeated.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge_command(
    call: Call,
    runs: tuple[str, ...],
    older_than: float | None,
    statuses: tuple[str, ...],
    *,
    yes: bool,
) -> int | None:
    """Delete runs completely: journal, copies and checkpoints.

    Name the runs, or choose them by age and by the status that 'maestro runs' shows; you are asked
    first. A run is purged together with its children. Refused are runs that a process executes, or
    that have changed since they were chosen. Children of a run that is not finished, which it would
    execute again, are only purged by name. A fork needs nothing of the run that it was made from.
    Nothing of a purged run can be resumed, and its bytes are overwritten in the journal. Its id may
    stay in runs that started it or were forked from it: an id should not be secret. Backups,
    exports and damaged logs that were moved away are not touched, nor is what a team run has
    written to the folder of its tasks: '.mahabharatha/state.json' is named, as the graph goes on
    from it. Tickets of its escalations stay as they are, since what was to be told them is deleted
    too; they are listed.

    Examples:
        maestro purge checkout-42
        maestro purge --older-than 30d --status success
        maestro purge --status failed --status cancelled --yes
    """
    return purge(call, runs, older_than, statuses, yes=yes)


def purge(
    call: Call,
    runs: Sequence[str],
    older_than: float | None = None,
    statuses: Sequence[str] = (),
    *,
    yes: bool,
    names_left: bool = True,
) -> int | None:
    """Delete runs, after a question; with ``names_left`` it is said that their state files stay."""
    with call.writing() as store:
        plan = plan_purge(store, call.folder, runs, older_than=older_than, statuses=statuses)
        if plan.needed and not plan.by_name:
            left_out = output.many(len(plan.needed), "run")
            output.note(f"{left_out} left out: children of runs not finished ({_parents(plan)})")
        if not plan.runs:
            output.note("no run matches")
            return None
        call.confirm(_question(plan), yes=yes)
        refused = 0
        for each in purge_runs(store, call.folder, plan):
            if each.refused is not None:
                complain(each.refused)
                refused += 1
            else:
                copies = output.many(each.copies, "copy", "copies")
                output.line(f"run {each.run_id!r} is purged, with {copies}")
            if each.left is not None and names_left:
                output.line(
                    f"{each.left.path} has the results of"
                    f" {output.many(each.left.complete, 'complete task')} of it, and stays: 'maestro run"
                    " GRAPH' goes on from it there, and starts over with --force"
                )
            for ticket in each.tickets:
                complain(
                    f"ticket {ticket} is about a step of run {each.run_id!r}, and is not told that"
                    " the run was purged: close it yourself"
                )
        if not store.empty_log():
            complain(
                "the journal is being read, so its log still has traces of what was purged;"
                " 'maestro gc' empties it"
            )
    return FAILED if refused else None


def _question(plan: PurgePlan) -> str:
    warning = (
        f"Runs that are not finished ({_parents(plan)}) will execute their children again:"
        f" {output.listed(list(plan.needed), _LISTED)}. "
    )
    counted = Counter(seen.status if seen else "without a journal" for seen in plan.runs.values())
    statuses = ", ".join(f"{count} {status}" for status, count in counted.most_common())
    names = output.listed(list(plan.runs), _LISTED)
    runs = f"{output.many(len(plan.runs), 'run')} ({names}; {statuses})"
    return f"{warning if plan.needed else ''}Purge {runs} for good?"


def _parents(plan: PurgePlan) -> str:
    return output.listed(list(dict.fromkeys(plan.needed.values())), _LISTED)


@verb("backup")
@click.argument("target", type=click.Path(path_type=Path))
def backup_command(call: Call, target: Path) -> None:
    """Copy a state folder, in use or not, to a new folder.

    The journal is copied as of one moment, whatever is written to it, and so are the checkpoints.
    The copy is a state folder of its own: choose it with --store, and its runs can be resumed
    there. It appears when it is complete: until then it is in a folder ".NAME.half" next to it, or
    ".half" in an empty folder that exists. What a killed backup left there is deleted by the next.

    Examples:
        maestro backup /backups/monday
        maestro backup /backups/monday && maestro doctor --store /backups/monday
    """
    copied = back_up(call.folder, target)
    output.line(f"{call.folder} was copied to {target} ({output.many(copied, 'file')})")


@verb("export")
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--with-values", is_flag=True, help="Keep secrets: only such a file can be imported.")
def export_command(
    call: Call, run_id: str, target: Path, *, force: bool, with_values: bool
) -> None:
    """Write a run to one file, to be read or imported elsewhere.

    The file has everything that is recorded, with a SHA-256 over all of it: completed steps,
    attempts, memory, history, waits. Secrets are replaced by [redacted], as docs/security.md says:
    such a file can be shown to others, and not be imported. With --with-values it has everything as
    it is stored, and can be imported. The run may be executed meanwhile: the file has it as of one
    moment. Inputs and results are in plain text; only you may read the file. FILE may be - for
    stdout. Children are runs of their own, and exported separately. What steps wrote to their
    streams is not in the file: 'maestro logs' prints it, and a backup of the folder has it.

    Examples:
        maestro export checkout-42 checkout-42.json
        maestro export checkout-42 checkout-42.json --force    replacing an existing file
        maestro export checkout-42 - --with-values | ssh other maestro import -
    """
    to_stdout = str(target) == "-"
    if not to_stdout:
        check_target(target, force=force)
    with call.reading() as reader:
        scratch = None if to_stdout else target.absolute().parent
        exported = export_run(reader, run_id, scratch, with_values=with_values)
    what = f"{output.many(exported.steps, 'step')}, {output.size(exported.size)}"
    if to_stdout:
        sys.stdout.buffer.writelines(exported.chunks())
        sys.stdout.buffer.flush()
        output.note(f"run {run_id!r}: {what}")
    else:
        write_export(target, exported.chunks(), force=force)
        output.line(f"run {run_id!r} was exported to {target}: {what}")
    if not with_values:
        output.note(
            f"secrets are replaced by {REDACTED}, so it cannot be imported; --with-values keeps them"
        )
    if exported.children:
        children = output.many(exported.children, "child run")
        output.note(f"it has {children}: export them separately")
    if exported.chunks_left_out:
        chunks = output.many(exported.chunks_left_out, "chunk")
        written = call.command_line("logs", run_id)
        output.note(f"its streams ({chunks}) are not in the file; to print them: {written}")


@verb("import")
@click.argument(
    "source", metavar="FILE", type=click.Path(exists=True, dir_okay=False, allow_dash=True)
)
@click.option("--as", "new_id", metavar="NEW_ID", help="Its id in this folder.  [default: its own]")
@click.option(
    "--graph",
    metavar="GRAPH",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The task graph of a state.  [default: .gsd/specs/FEATURE/task-graph.json]",
)
def import_command(call: Call, source: str, new_id: str | None, graph: Path | None) -> None:
    """Import a run that export --with-values wrote, or a state.

    The file is checked first: one that is damaged, redacted or of a newer version changes nothing. An id
    that exists is refused. The state folder is created if needed. Start the run's program on that
    folder with the same id: completed steps do not run again. With --as its steps have other effect
    keys than those of the original. FILE may be - for stdin.

    A state of MAHABHARATHA, .mahabharatha/state.json or .mahabharatha/state/FEATURE.json, becomes a run
    of its task graph in the current folder. What is complete in it stays complete.

    Examples:
        maestro import checkout-42.json
        maestro import checkout-42.json --as checkout-43      next to the run it was exported from
        maestro import checkout-42.json --store other         into another state folder, new or not
        maestro import .mahabharatha/state/shop.json --graph shop.json
    """
    if source == "-":
        file = spool(sys.stdin.buffer, "stdin")
    else:
        path = Path(source).resolve()  # a link stands for its target
        file = files.open_file(path, MAX_DOCUMENT_BYTES)
    if graph is not None or _is_state(file):
        _import_state(call, file, graph, new_id)
        return
    run_id, saved_at = import_run(call.folder, file, file.name, run_id=new_id)
    output.line(f"run {run_id!r} was imported into {call.folder}, as of {saved_at}")


def _is_state(file: files.ReadFile) -> bool:
    """Return whether a file is a state of MAHABHARATHA; an export is none, also a damaged one."""
    start = file.read_at(0, min(file.size, 64)).lstrip()
    if file.size > MAX_STATE_BYTES or start.startswith(b'{"document":'):
        return False
    try:
        tree = json.loads(file.read_at(0, file.size))
    except (ValueError, RecursionError):
        return False
    return isinstance(tree, dict) and bool({"tasks", "completed_tasks"} & tree.keys())


def _import_state(call: Call, file: files.ReadFile, graph: Path | None, new_id: str | None) -> None:
    from maestro_hive.admin.state_imports import import_state

    if file.size > MAX_STATE_BYTES:
        raise ConfigurationError(
            f"{file.name} is larger than the limit of {MAX_STATE_BYTES:,} bytes"
        )
    data = file.read_at(0, file.size)
    made = import_state(call.folder, data, Path(file.name), graph=graph, run_id=new_id)
    output.line(
        f"run {made.run_id!r} was made of {file.name}, with {len(made.complete)} of"
        f" {output.many(made.tasks, 'task')} complete"
    )
    if made.again:
        output.line(
            f"complete there, and executed again, as {made.graph} does not have them or a task that they"
            f" depend on is not complete: {output.listed(list(made.again), 8)}"
        )
    again = call.command_line("resume", made.run_id)
    if not made.has_personas:
        again = call.command_line("run", str(made.graph), "--persona", "COMMAND")
    output.line(f"to resume it: {again}")
