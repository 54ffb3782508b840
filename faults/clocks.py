"""Row 7: clocks that jump, that count from elsewhere, and that start again.

Real processes wait for a backoff or a breaker's cooldown, are killed, and go on in another world:
with another time on the wall (libfaketime), in another time namespace, after a pretended reboot
(another boot id over the kernel's). What they waited is measured out here.
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
from faults.child_processes import ChildProcesses, SilentError
from faults.manual_clocks import move_clocks
from faults.registry import Outcome, Plan, row
from faults.workflows import clocks_here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.child_processes import Life

#: How long is waited, and how much later a busy machine may be.
SECONDS, SLACK = 2.5, 1.5
#: How much earlier it may look from here: what is said is seen a little later.
_EARLY = 0.05
_STUCK = 12.0
#: Two clocks that differ by so many seconds are not the same.
_FAR = 1800.0
_WAITS = ("backoff", "cooldown")
_AT_ONCE = 8
_A_DAY = "86400"
_BIND = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'


@row(
    7,
    "clock jumps do no harm",
    "in a boot nothing early, late or stuck; after a reboot at most one full wait again",
)
def clocks(plan: Plan, outcome: Outcome) -> None:
    """Let real processes wait in all these worlds, then move a manual clock at random."""
    rng = random.Random(plan.seed)
    cases = [
        case
        for number in range(plan.amount(quick=1, full=8))
        for case in _cases(plan.scratch / f"round-{number}", rng, outcome if not number else None)
    ]
    waited: list[float] = []
    before = outcome.failed
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = pool.map(_live_through, cases)
        for case, seen in plan.watch("waits", zip(cases, done, strict=True), len(cases)):
            for wrong in seen.wrong:
                outcome.fail(f"{case.name}: {wrong}")
            waited.append(seen.late)
    outcome.ran.append(f"{len(cases)} waits of {SECONDS:g} s in other worlds")
    outcome.measured.append(
        f"{outcome.failed - before} of them wrong; the latest {max(waited):.2f} s late"
    )
    _hold_across_namespaces(plan, outcome)
    move_clocks(plan, outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What decides which time a process sees, and what of it is another one than here."""

    before: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    other: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A wait that is begun in one world and ended in another."""

    name: str
    workflow: str
    folder: Path
    first: World = World()
    second: World = World()
    #: After a reboot it may be early, and begin again.
    rebooted: bool = False
    #: A file that sets the wall clock, and what to write into it while the process waits.
    jump: tuple[Path, str] | None = None
    kill_after: float = 1.0


@dataclass(slots=True, kw_only=True)
class Seen:
    """What became of a case."""

    wrong: list[str] = field(default_factory=list)
    late: float = 0.0


# --- the worlds ----------------------------------------------------------------------------------


def _wall(offset: str) -> World:
    """Return a world with another time on the wall, in which the other clocks are right."""
    return World(environment=_faketime(FAKETIME=offset), other=frozenset({"wall"}))


def _faketime(**how: str) -> dict[str, str]:
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return {"LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1", **how}


def _namespace() -> World:
    """Return a world whose clocks since boot are a day ahead, in the same boot."""
    words = ("unshare", "-T", "--boottime", _A_DAY, "--monotonic", _A_DAY)
    return World(before=words, other=frozenset({"boot"}))


def _reboot(folder: Path, offset: str | None = None) -> World:
    """Return a world with another boot id, and perhaps another time on the wall."""
    boot_id = folder / f"boot-{uuid.uuid4()}"
    boot_id.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
    words = ("unshare", "-m", "sh", "-c", _BIND, str(boot_id))
    wall = _wall(offset) if offset else World()
    return World(before=words, environment=wall.environment, other=wall.other | {"boot_id"})


def _cases(top: Path, rng: random.Random, outcome: Outcome | None) -> Iterator[Case]:
    """Yield what this machine can do; say once what it cannot."""
    top.mkdir()
    no_faketime = tools.missing("faketime")
    no_namespace = tools.missing("unshare") or tools.unprivileged() or _refused("-T")
    no_mounts = tools.missing("unshare", "mount") or tools.unprivileged() or _refused("-m")
    if outcome is not None:
        for what, reason in (
            ("other times on the wall", no_faketime),
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
    yield Case(name="no change at all", workflow=workflow, folder=top)


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
        moved = World(
            environment=_faketime(FAKETIME_TIMESTAMP_FILE=str(setting), FAKETIME_NO_CACHE="1"),
            other=frozenset({"wall"}),
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
        ("into a time namespace that is a day ahead", World(), ahead),
        ("out of a time namespace that is a day ahead", ahead, World()),
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
    """A run that a living process holds is refused to one whose clock counts from elsewhere."""
    if tools.missing("unshare") or tools.unprivileged() or _refused("-T"):
        return
    for name, first, second in (
        ("a day ahead", World(), _namespace()),
        ("a day behind", _namespace(), World()),
    ):
        folder = plan.scratch / name
        with _children(first) as one, _children(second) as other:
            holder = one.start("holding", folder)
            holder.wait_until_it_says("held")
            said = other.start("holding", folder).wait_until_it_says("answer")
        right = said.get("refused") == holder.pid
        outcome.require(right, f"a run was taken from its living holder by a process {name}")
    outcome.ran.append("2 runs held across time namespaces")


def _refused(how: str) -> str:
    tried = subprocess.run(["unshare", how, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


# --- living through one --------------------------------------------------------------------------


def _live_through(case: Case) -> Seen:
    with _children(case.first) as first, _children(case.second) as second:
        life = first.start(case.workflow, case.folder, seconds=SECONDS)
        life.wait_until_it_says("fails")
        failed = time.monotonic()
        time.sleep(case.kill_after)
        if case.jump is not None:
            _set(*case.jump)
        else:
            life.kill()
            life.end()
            life = second.start(case.workflow, case.folder, seconds=SECONDS)
        life.wait_until_it_says("up")
        up = time.monotonic()
        return _judge(case, life, failed, up)


def _judge(case: Case, life: Life, failed: float, up: float) -> Seen:
    seen = Seen()
    try:
        said = life.wait_until_it_says("done", seconds=_STUCK)
    except SilentError:
        life.kill()
        seen.wrong.append(f"stuck: it still waits after {_STUCK:g} s")
    else:
        other = _differences(said)
        if other != case.second.other:
            seen.wrong.append(f"it was to see another {set(case.second.other)}, and saw {other}")
    done = time.monotonic()
    code = life.end()
    if code and not seen.wrong:
        seen.wrong.append(f"it ended with {code}")
    if case.rebooted:
        seen.late = max(0.0, done - up - SECONDS)
    else:
        seen.late = max(0.0, done - max(failed + SECONDS, up))
        early = failed + SECONDS - done
        if early > _EARLY:
            seen.wrong.append(f"{early:.2f} s early")
    if seen.late > SLACK and not seen.wrong:
        seen.wrong.append(f"{seen.late:.2f} s late")
    return seen


def _differences(said: dict[str, Any]) -> set[str]:
    """Return which clocks of a process are not the ones here."""
    here = clocks_here()
    other = {name for name in ("wall", "boot") if abs(said[name] - here[name]) > _FAR}
    return other | ({"boot_id"} if said["boot_id"] != here["boot_id"] else set())


def _children(world: World) -> ChildProcesses:
    return ChildProcesses("faults.workflows", before=world.before, environment=world.environment)


def _set(path: Path, offset: str) -> None:
    """Set the wall clock of those who look into this file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(offset, encoding="ascii")
    os.replace(temporary, path)  # noqa: PTH105 - in one step, as they may be looking
