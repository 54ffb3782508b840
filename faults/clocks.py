"""Row 7: clocks that jump, that have another origin, and that restart.

Real processes wait for a backoff or a breaker's cooldown, are killed, and resume in another
environment: with another wall time (libfaketime), in another time namespace, after a simulated
reboot (another boot id mounted over the kernel's). The waits are measured from outside.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults import tools
from faults.child_processes import ChildProcesses, NoReportError, ObservedRun
from faults.executor_workflows import FAILING, clocks_here
from faults.manual_clocks import move_clocks
from faults.registry import Outcome, Plan, row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.child_processes import ChildProcess

#: Seconds of a wait, and how much later a busy machine may be.
SECONDS, SLACK = 2.5, 1.5
#: How much earlier a wait may appear to end: reports are seen a little late.
_EARLY = 0.05
_STUCK = 30.0
#: Two clocks that differ by more seconds than this are different ones.
_FAR = 1800.0
_WAITS = ("backoff", "cooldown")
_CONCURRENT = 8
_A_DAY = "86400"
_BIND = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


@row(
    7,
    "clock jumps do no harm",
    "in a boot nothing early, late or stuck; after a reboot at most one full wait again",
)
def clocks(plan: Plan, outcome: Outcome) -> None:
    """Let real processes wait in all these environments, then move a manual clock at random."""
    rng = random.Random(plan.seed)
    cases = [
        case
        for number in range(plan.amount(quick=1, full=8))
        for case in _cases(plan.scratch / f"round-{number}", rng, outcome if not number else None)
    ]
    waited: list[float] = []
    before = outcome.failed
    with ThreadPoolExecutor(_CONCURRENT) as pool:
        done = pool.map(_run_case, cases)
        for case, seen in plan.track("waits", zip(cases, done, strict=True), len(cases)):
            for wrong in seen.wrong:
                outcome.fail(f"{case.name}: {wrong}")
            waited.append(seen.late)
    outcome.ran.append(f"{len(cases)} waits of {SECONDS:g} s in other environments")
    outcome.measured.append(
        f"{outcome.failed - before} of them wrong; the latest {max(waited):.2f} s late"
    )
    _hold_across_namespaces(plan, outcome)
    move_clocks(plan, outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What determines the clocks of a process, and which of them differ from the ones here."""

    before: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    different: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A wait that starts in one environment and ends in another."""

    name: str
    workflow: str
    folder: Path
    first: Environment = Environment()
    second: Environment = Environment()
    #: After a reboot the wait may end early, or start again.
    rebooted: bool = False
    #: A file that sets the wall clock, and what to write into it while the process waits.
    jump: tuple[Path, str] | None = None
    kill_after: float = 1.0


@dataclass(slots=True, kw_only=True)
class CaseResult:
    """The result of a case."""

    wrong: list[str] = field(default_factory=list)
    late: float = 0.0


# --- the environments ----------------------------------------------------------------------------


def _wall(offset: str) -> Environment:
    """Return an environment with another wall time, in which the other clocks are right."""
    return Environment(environment=_faketime(FAKETIME=offset), different=frozenset({"wall"}))


def _faketime(**how: str) -> dict[str, str]:
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return {"LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1", **how}


def _namespace() -> Environment:
    """Return an environment whose clocks since boot are a day ahead, in the same boot."""
    words = ("unshare", "-T", "--boottime", _A_DAY, "--monotonic", _A_DAY)
    return Environment(before=words, different=frozenset({"boot"}))


def _reboot(folder: Path, offset: str | None = None) -> Environment:
    """Return an environment with another boot id, and perhaps another wall time."""
    boot_id = folder / f"boot-{uuid.uuid4()}"
    boot_id.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
    words = ("unshare", "-m", "sh", "-c", _BIND, str(boot_id))
    wall = _wall(offset) if offset else Environment()
    return Environment(
        before=words, environment=wall.environment, different=wall.different | {"boot_id"}
    )


def _cases(top: Path, rng: random.Random, outcome: Outcome | None) -> Iterator[Case]:
    """Yield the cases that this machine can run; record once which it cannot."""
    top.mkdir()
    no_faketime = tools.missing("faketime")
    no_namespace = tools.missing("unshare") or tools.unprivileged() or _refused("-T")
    no_mounts = tools.missing("unshare", "mount") or tools.unprivileged() or _refused("-m")
    if outcome is not None:
        for what, reason in (
            ("other wall times", no_faketime),
            ("time namespaces", no_namespace),
            ("reboots", no_mounts),
        ):
            if reason:
                outcome.not_run.append(f"{what}: {reason}")
    for workflow in _WAITS:
        for number, case in enumerate(
            (
                *_plain_cases(top, workflow),
                *([] if no_faketime else _wall_cases(top, workflow)),
                *([] if no_namespace else _namespace_cases(top, workflow)),
                *([] if no_mounts else _reboot_cases(top, workflow, fake=not no_faketime)),
            )
        ):
            yield _placed(case, top / f"{workflow}-{number}", rng)


def _placed(case: Case, folder: Path, rng: random.Random) -> Case:
    return Case(
        name=f"{case.workflow}, {case.name}",
        workflow=case.workflow,
        folder=folder,
        first=case.first,
        second=case.second,
        rebooted=case.rebooted,
        jump=case.jump,
        kill_after=rng.uniform(0.1, 0.6) * SECONDS,
    )


def _plain_cases(top: Path, workflow: str) -> Iterator[Case]:
    yield Case(name="no change", workflow=workflow, folder=top)


def _wall_cases(top: Path, workflow: str) -> Iterator[Case]:
    for offset in ("+1h", "-1h"):
        yield Case(
            name=f"the wall clock {offset} after the kill",
            workflow=workflow,
            folder=top,
            second=_wall(offset),
        )
        yield Case(
            name=f"the wall clock {offset} before the kill",
            workflow=workflow,
            folder=top,
            first=_wall(offset),
        )
        setting = top / f"{workflow}{offset}"
        setting.write_text("+0", encoding="ascii")
        moved = Environment(
            environment=_faketime(FAKETIME_TIMESTAMP_FILE=str(setting), FAKETIME_NO_CACHE="1"),
            different=frozenset({"wall"}),
        )
        yield Case(
            name=f"the wall clock {offset} in the wait",
            workflow=workflow,
            folder=top,
            first=moved,
            second=moved,
            jump=(setting, offset),
        )


def _namespace_cases(top: Path, workflow: str) -> Iterator[Case]:
    ahead = _namespace()
    for name, first, second in (
        ("all of it in a time namespace", ahead, ahead),
        ("into a time namespace that is a day ahead", Environment(), ahead),
        ("out of a time namespace that is a day ahead", ahead, Environment()),
    ):
        yield Case(name=name, workflow=workflow, folder=top, first=first, second=second)


def _reboot_cases(top: Path, workflow: str, *, fake: bool) -> Iterator[Case]:
    for offset in (None, "+1h", "-1h") if fake else (None,):
        yield Case(
            name=f"a reboot, the wall clock {offset or 'right'}",
            workflow=workflow,
            folder=top,
            second=_reboot(top, offset),
            rebooted=True,
        )


def _hold_across_namespaces(plan: Plan, outcome: Outcome) -> None:
    """A run that a live process holds is refused to one whose clocks have another origin."""
    if tools.missing("unshare") or tools.unprivileged() or _refused("-T"):
        return
    for name, first, second in (
        ("a day ahead", Environment(), _namespace()),
        ("a day behind", _namespace(), Environment()),
    ):
        folder = plan.scratch / name
        with _children(first) as one, _children(second) as other:
            holder = one.start("holding", folder)
            holder.wait_for_report("leased")
            reports = other.start("holding", folder).wait_for_report("answer")
        right = reports.get("refused") == holder.pid
        outcome.require(right, f"a run was taken over from its live holder by a process {name}")
    outcome.ran.append("2 runs held across time namespaces")


def _refused(how: str) -> str:
    tried = subprocess.run(["unshare", how, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


# --- running a case ------------------------------------------------------------------------------


def _run_case(case: Case) -> CaseResult:
    with _children(case.first) as first, _children(case.second) as second:
        started = time.monotonic()
        process = first.start(case.workflow, case.folder, seconds=SECONDS)
        process.wait_for_report("fails")
        failed = _failed_at(case.folder)
        time.sleep(case.kill_after)
        if case.jump is not None:
            _set(*case.jump)
        else:
            process.kill()
            process.end()
            process = second.start(case.workflow, case.folder, seconds=SECONDS)
        process.wait_for_report("up")
        up = time.monotonic()
        # As slowly as it started, it may also end: the machine does something else as well.
        return _judge(case, process, failed, up, slack=SLACK + failed - started)


def _was_interrupted(case: Case) -> bool:
    """Return whether it was killed before its failure was recorded, and had nothing to wait for."""
    steps = ObservedRun(case.folder, {}).journal().steps.values()
    return case.workflow == "backoff" and any(step.interruptions for step in steps)


def _failed_at(folder: Path) -> float:
    """Return when the failure happened, which is reported later."""
    return time.monotonic() - (time.time() - (folder / FAILING).stat().st_mtime)


def _judge(case: Case, process: ChildProcess, failed: float, up: float, slack: float) -> CaseResult:
    seen = CaseResult()
    try:
        reports = process.wait_for_report("done", seconds=_STUCK)
    except NoReportError:
        process.kill()
        seen.wrong.append(f"stuck: still waiting after {_STUCK:g} s")
    else:
        other = _differences(reports)
        if other != case.second.different:
            seen.wrong.append(f"{set(case.second.different)} should differ, and {other} does")
    done = time.monotonic()
    code = process.end()
    if code and not seen.wrong:
        seen.wrong.append(f"it ended with {code}")
    if case.rebooted:
        seen.late = max(0.0, done - up - SECONDS)
    else:
        seen.late = max(0.0, done - max(failed + SECONDS, up))
        early = failed + SECONDS - done
        if early > _EARLY and not _was_interrupted(case):
            seen.wrong.append(f"{early:.2f} s early")
    if seen.late > slack and not seen.wrong:
        seen.wrong.append(f"{seen.late:.2f} s late")
    return seen


def _differences(reports: dict[str, Any]) -> set[str]:
    """Return which clocks of a process differ from the ones here."""
    here = clocks_here()
    other = {name for name in ("wall", "boot") if abs(reports[name] - here[name]) > _FAR}
    return other | ({"boot_id"} if reports["boot_id"] != here["boot_id"] else set())


def _children(environment: Environment) -> ChildProcesses:
    return ChildProcesses(
        "faults.executor_workflows", before=environment.before, environment=environment.environment
    )


def _set(path: Path, offset: str) -> None:
    """Set the wall clock of the processes that read this file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(offset, encoding="ascii")
    os.replace(temporary, path)  # noqa: PTH105 - atomically, since they may be reading
