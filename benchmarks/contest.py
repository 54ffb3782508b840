"""The contest: every contender in a process of its own, turn by turn, round after round."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import peers
from benchmarks.machine import Quiet, wait_until_quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.contender import Contender, Figures
    from benchmarks.registry import Registry

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_SECONDS = 1_800
#: With fewer quiet rounds than this the others count too.
_ENOUGH_ROUNDS = 3
_SYNC_CALLS = "fsync,fdatasync,sync_file_range,msync,kill"
_SYNC_CALL = re.compile(r"\b(fsync|fdatasync|sync_file_range|msync)\(")
_MARK = re.compile(r"\bkill\(\d+, 0\)")


class NotMeasuredError(LookupError):
    """A contender that a line of the table needs has no figures."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} was not measured")
        self.name = name


class Results:
    """What was measured: per contender, one set of figures per round."""

    def __init__(self) -> None:
        self.figures: dict[str, list[Figures]] = defaultdict(list)
        self.syncs: dict[str, float] = {}
        self.quiet: list[Quiet] = []
        #: Contenders that were asked for and have no figures, with the reason.
        self.absent: dict[str, str] = {}

    def asked(self, name: str) -> bool:
        """Return whether this contender was to be measured, whatever came of it."""
        return self.has(name) or name in self.absent

    def has(self, *names: str) -> bool:
        """Return whether all of these contenders were measured."""
        return all(self.figures.get(name) for name in names)

    @property
    def quiet_rounds(self) -> list[int]:
        """The rounds during which nobody else used the machine."""
        return [number for number, quiet in enumerate(self.quiet) if quiet.reached]

    def counted(self, name: str) -> list[Figures]:
        """Return a contender's figures of the quiet rounds, or of all if those are too few."""
        found = self.figures.get(name)
        if not found:
            raise NotMeasuredError(name)
        if len(found) < len(self.quiet) or len(self.quiet_rounds) < _ENOUGH_ROUNDS:
            return found
        return [found[number] for number in self.quiet_rounds]

    def median(self, name: str, figure: str) -> float:
        """Return a figure's median over the rounds that count."""
        return statistics.median(each[figure] for each in self.counted(name))

    def worst(self, name: str, figure: str) -> float:
        """Return a figure's largest value in any round that counts."""
        return max(each[figure] for each in self.counted(name))

    def ratio(self, name: str, figure: str, other: str, other_figure: str) -> float:
        """Return the median over the rounds that count of the ratio within a round."""
        pairs = zip(self.counted(name), self.counted(other), strict=True)
        return statistics.median(one[figure] / two[other_figure] for one, two in pairs)


class Contest:
    """Runs contenders on new folders inside ``place``; tells ``say`` how it goes."""

    def __init__(
        self, registry: Registry, place: Path, quiet_seconds: float, say: Callable[[str], None]
    ) -> None:
        self._registry = registry
        self._place = place
        self._quiet_seconds = quiet_seconds
        self._say = say
        self._filled: dict[str, Path] = {}

    def hold(self, chosen: Sequence[Contender], rounds: int, *, count_syncs: bool) -> Results:
        """Measure these contenders."""
        results = Results()
        for number in range(1, rounds + 1):
            self._say(f"round {number} of {rounds}")
            self._hold_round([each for each in chosen if not each.once], results)
        for contender in chosen:
            if contender.once:
                self._take_turn(contender, results)
        if count_syncs:
            traced = [each for each in chosen if each.durable and not each.postgres]
            self._count_syncs([each for each in traced if results.has(each.name)], results)
        return results

    def _hold_round(self, contenders: Sequence[Contender], results: Results) -> None:
        """Wait for a quiet machine before every turn, in all no longer than was allowed."""
        busy_timeout, loudest = self._quiet_seconds, 0.0
        for contender in contenders:
            if contender.name in results.absent:
                continue
            quiet = wait_until_quiet(busy_timeout)
            busy_timeout = max(0.0, busy_timeout - quiet.waited)
            loudest = max(loudest, quiet.busy_share or 0.0)
            self._take_turn(contender, results)
        quiet = Quiet(loudest, self._quiet_seconds - busy_timeout)
        results.quiet.append(quiet)
        if not quiet.reached:
            self._say(f"  the machine was NOT quiet: up to {loudest:.0%} busy with something else")

    def _take_turn(self, contender: Contender, results: Results) -> None:
        try:
            with tempfile.TemporaryDirectory(dir=self._place) as folder:
                self._prepare(contender, folder)
                found: Figures = json.loads(self._run_child([], contender, "measure", folder))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            self._say(f"  {contender.name:<20} FAILED: {error}")
            results.absent[contender.name] = "FAILED: see what it printed above"
            results.figures.pop(contender.name, None)
            return
        results.figures[contender.name].append(found)
        shown = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
        self._say(f"  {contender.name:<20} {shown}")

    def _prepare(self, contender: Contender, folder: str) -> None:
        if contender.prepare is None:
            return
        if not contender.filled:
            self._run_child([], contender, "prepare", folder)
            return
        if contender.name not in self._filled:
            self._say(f"  {contender.name:<20} is being filled, once for all rounds")
            filled = self._filled[contender.name] = Path(tempfile.mkdtemp(dir=self._place))
            self._run_child([], contender, "prepare", str(filled))
        shutil.copytree(self._filled[contender.name], folder, dirs_exist_ok=True)
        os.sync()  # so that the copy is not still being written while it is measured

    def _count_syncs(self, chosen: list[Contender], results: Results) -> None:
        strace = shutil.which("strace")
        if strace is None:
            self._say("syncs per step are not counted: there is no strace on this machine")
            return
        self._say("counting syncs per step with strace")
        for contender in chosen:
            with tempfile.TemporaryDirectory(dir=self._place) as folder:
                log = Path(folder) / "strace.log"
                before = [strace, "-f", "-e", f"trace={_SYNC_CALLS}", "-o", str(log)]
                work = Path(folder) / "work"
                work.mkdir()
                try:
                    found = json.loads(self._run_child(before, contender, "measure", str(work)))
                except subprocess.CalledProcessError:
                    self._say("  strace may not trace here: not counted")
                    return
                count = _syncs_between_marks(log.read_text(encoding="utf-8", errors="replace"))
                results.syncs[contender.name] = count / found["steps"]

    def _run_child(self, before: list[str], contender: Contender, *words: str) -> str:
        python = peers.interpreter() if contender.peer else sys.executable
        module = self._registry.module_of(contender.name)
        done = subprocess.run(
            [*before, python, "-m", "benchmarks.child", module, contender.name, *words],
            cwd=_ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        return done.stdout


def _syncs_between_marks(log: str) -> int:
    first, last = (match.start() for match in _ends(list(_MARK.finditer(log))))
    return len(_SYNC_CALL.findall(log, first, last))


def _ends(marks: list[re.Match[str]]) -> tuple[re.Match[str], re.Match[str]]:
    return marks[0], marks[-1]
