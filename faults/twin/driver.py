"""Runs a program twice, undisturbed and disturbed, and compares what the two came to.

**The undisturbed run** is one process to its end. **The disturbed run** has up to five lives that are
stopped or killed, then one in which the workflow ends and the process is killed before that is
recorded, and then one that replays the whole history. Questions are answered from outside by
what they are about, and a run that waits to be cancelled is cancelled from outside.

With ``workers``, the disturbed run is enqueued, and each of its lives is a worker, which also releases
it from memory whenever it only waits, and takes it again: so one process executes it several times.

What is compared, and why that is sound:

1. In each run, what the workflow got at a place is what the body there returned or raised: a swap
   of equal calls, another order or a lost cause shows, also where all lives have it.
2. In the disturbed run, a later life sees at each position of each branch what an earlier one saw
   there. What an earlier life saw was recorded before; not so the clock and the dice until another
   outcome was recorded after them, nor anything after a polite stop: these are left out.
3. The replay sees exactly what the life before it saw, ends in the same way, and calls no step: all
   outcomes are recorded.
4. No step is called at a place after the workflow saw an outcome there, and none in the body of a
   ``try`` after one in its ``finally``.
5. Unless the program depends on the order of concurrent steps (``programs.is_ordered``): both runs
   have the same result, saw the same at each place of each workflow, and called the same steps
   with the same inputs at the same places. Attempts that were repeated are no difference, and the
   clock and the dice are compared by rule 3 alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from faults.child_processes import RUN, ChildProcesses
from faults.twin import program, working
from faults.twin.programs import all_nodes, is_ordered
from maestro_hive import Hive, MaestroError

if TYPE_CHECKING:
    from faults.twin.programs import Node

MODULE = "faults.twin.working"
_POLL_SECONDS = 0.02
#: Exit codes of lives that were stopped politely.
_STOPPED = (130, 143)
_KILLED = -9
_SHOWN = 400
#: How often a program is run again if it was cancelled at the wrong moment.
_TRIES = 4


class Difference(NamedTuple):
    """One way in which a disturbed run is not the undisturbed one."""

    category: str
    text: str

    def __str__(self) -> str:
        return f"{self.category}: {self.text[:_SHOWN]}"


@dataclass(slots=True)
class Report:
    """What came of one program."""

    spec: Node
    differences: list[Difference] = field(default_factory=list)
    lives: int = 0
    #: Where the signals landed: in a step, or not.
    landed: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    #: Whether a cancellation came when no process executed the run: that is another test's.
    is_void: bool = False
    #: Whether the disturbed run was executed by workers.
    workers: bool = False

    @property
    def categories(self) -> set[str]:
        """The kinds of differences."""
        return {each.category for each in self.differences}


def compare(spec: Node, folder: Path, children: ChildProcesses, *, workers: bool = False) -> Report:
    """Run a program undisturbed and disturbed, and return the differences."""
    report = _compare(spec, folder, children, workers=workers)
    for _ in range(_TRIES - 1):
        if not report.is_void:
            break
        report = _compare(spec, folder, children, workers=workers)
    if report.is_void:
        report.differences.clear()
    return report


def _compare(spec: Node, folder: Path, children: ChildProcesses, *, workers: bool) -> Report:
    started = time.monotonic()
    report = Report(spec, workers=workers)
    shutil.rmtree(folder, ignore_errors=True)
    undisturbed = _Twin(folder / "undisturbed", spec, children, report)
    disturbed = _Twin(folder / "disturbed", spec, children, report)
    if undisturbed.run_undisturbed() and disturbed.run_disturbed(undisturbed.read()):
        whole, other = undisturbed.read(), disturbed.read()
        for each in (whole, other):
            each.check_bodies(report)
        other.check_lives(report)
        other.check_replay(report)
        if not is_ordered(spec):
            _check_twins(whole, other, report)
    report.seconds = time.monotonic() - started
    if not report.differences:
        shutil.rmtree(folder, ignore_errors=True)
    return report


class _Twin:
    """One run of a program, in its own folder."""

    def __init__(self, folder: Path, spec: Node, children: ChildProcesses, report: Report) -> None:
        self._folder = folder
        self._spec = spec
        self._children = children
        self._report = report
        self._lives = 0
        self._kind = "life"
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(spec))

    def read(self) -> Ledger:
        """Return what its lives wrote."""
        return Ledger.read(self._folder / "ledger")

    def run_undisturbed(self) -> bool:
        """Run it to its end; return whether it came to one."""
        with _Attendant(self._folder, self._spec, self._report) as self._attendant:
            code = self._live(latency="undisturbed")
        if code != 0:
            self._fail("undisturbed", code)
        return code == 0

    def run_disturbed(self, whole: Ledger) -> bool:
        """Stop it, or kill it, and resume it, until it ends; return whether it came to an end."""
        options: dict[str, Any] = {"latency": "disturbed"}
        if self._report.workers:
            self._kind = "work"
            options["slowness"] = working.SLOWNESS
            working.enqueue(self._folder, self._spec)
        with _Attendant(self._folder, self._spec, self._report) as self._attendant:
            for stop in self._spec["stops"]:
                number = self.read().number_of_stop(stop, whole)
                code = self._live(**options, stop={**stop, "number": number}, die_at_end=True)
                self._note_landing()
                if code not in (_KILLED, *_STOPPED):
                    return self._fail("disturbed", code)
                if self.read().has_ended:
                    break
            if not self.read().has_ended:
                code = self._live(**options, die_at_end=True)
                if code != _KILLED or not self.read().has_ended:
                    return self._fail("resumed", code)
            code = self._live(**options)
        self._report.landed.update(self.read().releases())
        return code == 0 or self._fail("replayed", code)

    def _live(self, **options: Any) -> int:
        self._lives += 1
        self._report.lives += 1
        process = self._children.start(self._kind, self._folder, life=self._lives, **options)
        self._attendant.process = process.pid
        return process.end()

    def _fail(self, which: str, code: int) -> bool:
        how = "it hangs" if code == 98 else f"it ended with {code}"
        how += "" if self.read().has_ended else ", and the workflow did not come to its end"
        errors = self._folder / "errors"
        text = errors.read_text()[-1500:] if errors.exists() else ""
        last = self.read().lines[-1:]
        what = f"{which}: {how}; the last line is {last}; {text[-_SHOWN:]}"
        category = {0: "no clean-up", 98: "hang"}.get(code, "crash")
        self._report.differences.append(Difference(category, what))
        return False

    def _note_landing(self) -> None:
        lines = [
            line for line in self.read().lines if line["life"] // program.EXECUTIONS == self._lives
        ]
        stops = [
            number
            for number, line in enumerate(lines)
            if line["what"] == "stop" and line["how"] != program.RELEASED
        ]
        if not stops:
            self._report.landed["not reached"] += 1
            return
        lines = lines[: stops[0]]
        started = {line["at"] for line in lines if line["what"] == "call"}
        ended = {_place(line) for line in lines if line["what"] == "saw"}
        self._report.landed["in a step" if started - ended else "elsewhere"] += 1


# --- what is asked from outside --------------------------------------------------------------------


class _Attendant(threading.Thread):
    """Answers the questions of a run and its children, and cancels it when it waits for that."""

    def __init__(self, folder: Path, spec: Node, report: Report) -> None:
        super().__init__(daemon=True)
        self._report = report
        self.process = 0
        ops = {each["op"] for each in all_nodes(spec)}
        self._answers = "ask" in ops
        self._cancels = "wait_to_be_cancelled" in ops
        self._folder = folder
        self._ended = threading.Event()
        self._answered: set[tuple[str, str]] = set()
        self._is_cancelled = False

    def __enter__(self) -> Self:
        if self._answers or self._cancels:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Attend to the run until it has ended."""
        with Hive(self._folder / "state", program.config()) as hive:
            pause = working.ANSWER_SECONDS if self._report.workers else _POLL_SECONDS
            while not self._ended.wait(pause):
                if not (self._folder / "ledger").exists():
                    continue
                with contextlib.suppress(MaestroError):  # such as: it has ended meanwhile
                    self._attend(hive)

    def _attend(self, hive: Hive) -> None:
        for each in hive.runs() if self._answers else ():
            if each.status not in ("success", "failed", "cancelled"):
                self._answer(hive, each.run_id)
        if self._cancels and not self._is_cancelled:
            self._cancel(hive)

    def _answer(self, hive: Hive, run_id: str) -> None:
        """Answer each question once, by what it is about; without that, each in another way."""
        for question in hive.questions(run_id):
            name, about = question.name, question.about
            if name == "never answered" or (run_id, question.id) in self._answered:
                continue
            number = len(self._answered)
            subject = {"number": number} if about is None else {"about": json.dumps(about)}
            hive.answer(run_id, name, {"answer": name, **subject}, question=question.id)
            self._answered.add((run_id, question.id))

    def _cancel(self, hive: Hive) -> None:
        """Cancel the run while a process executes it."""
        lines = Ledger.read(self._folder / "ledger").lines
        waits = lines and any(
            line["what"] == "cancellable" and line["life"] == lines[-1]["life"] for line in lines
        )
        if not waits or not _is_alive(self.process):
            return
        self._is_cancelled = True
        hive.cancel(RUN, "from outside")
        is_over = any(each.status == "cancelled" for each in hive.runs() if each.run_id == RUN)
        if is_over and not Ledger.read(self._folder / "ledger").has_ended:
            self._report.is_void = True  # the process had died, and nothing could clean up


def _is_alive(pid: int) -> bool:
    """Return whether a process executes something: it exists, and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# --- what was written ------------------------------------------------------------------------------


def _place(line: dict[str, Any]) -> str:
    """Return the place of what a workflow saw."""
    return f"{line['at'].rpartition('|')[0]}|{line['event'][0]}"


def _check_answer(place: str, shown: str, report: Report) -> None:
    """Check that an answer is that to the question which was asked at this place."""
    about = re.search(r'"place": "([^"]+)"', shown)
    if about is not None and about[1] != place:
        what = f"{place} got the answer to {about[1]}"
        report.differences.append(Difference("answer to another question", what))


class Ledger:
    """The lines that the lives of one run wrote."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Return the lines so far."""
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return cls([json.loads(line) for line in whole.splitlines()])

    @property
    def has_ended(self) -> bool:
        """Return whether the workflow came to its end in some life."""
        return any(line["what"] == "end" and line["at"] == "run" for line in self.lines)

    @property
    def result(self) -> str:
        """What ``hive.run`` came to."""
        return next(str(line["shown"]) for line in self.lines if line["what"] == "result")

    def releases(self) -> dict[str, int]:
        """Return how often the run was released from memory, if it was."""
        found = sum(line.get("how") == program.RELEASED for line in self.lines)
        return {"releases": found} if found else {}

    def ends(self) -> dict[str, dict[str, Any]]:
        """Return how each workflow ended at last, by its place."""
        return {line["at"]: line for line in self.lines if line["what"] == "end"}

    def number_of_stop(self, stop: dict[str, Any], whole: Ledger) -> int:
        """Return at which call, or at which line, of the next life a stop comes."""
        seen = {_place(line) for line in self.lines if line["what"] == "saw"}
        called = [line["at"] for line in whole.lines if line["what"] == "call"]
        left = sum(at not in seen for at in called)
        if stop["on"] == "line":
            left = len(whole.lines) - 2 * (len(called) - left)
        part: float = stop["part"]
        return max(1, math.ceil(part * left))

    def calls(self) -> dict[tuple[str, str, str], list[str]]:
        """Return the effect keys of the calls, by place, step and input."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for line in self.lines:
            if line["what"] == "call":
                key = (line["at"], line["step"], line["input"])
                found.setdefault(key, []).append(line["effect"])
        return found

    # --- checks ---

    def check_bodies(self, report: Report) -> None:
        """Compare what workflows got with what the bodies at the same places gave."""
        given: dict[str, set[str]] = {}
        called = {line["at"]: line["step"] for line in self.lines if line["what"] == "call"}
        for line in self.lines:
            if line["what"] in ("returned", "raised"):
                given.setdefault(line["at"], set()).add(line["shown"])
        for line in self.lines:
            if line["what"] != "saw":
                continue
            shown, place = line["event"][2].partition(" shared ")[0], _place(line)
            if line["event"][1] == "answer":
                _check_answer(place, shown, report)
            elif place not in called or line["event"][1] not in ("value", "error"):
                continue
            elif called[place] not in ("slow", "stuck") and shown not in given.get(place, set()):
                category = f"{line['event'][1]} not as the body gave it"
                what = f"{place} got {shown}, and the body gave {sorted(given.get(place, ()))}"
                report.differences.append(Difference(category, what))
        for key, effects in self.calls().items():
            if len(set(effects)) > 1:
                what = f"{key} has {len(set(effects))} effect keys"
                report.differences.append(Difference("effect keys", what))

    def check_lives(self, report: Report) -> None:
        """Compare what each life saw with what earlier ones saw, and look for repetitions."""
        seen: dict[str, list[Any]] = {}
        for life in sorted({line["life"] for line in self.lines}):
            now = {line["at"]: line["event"] for line in self._seen_in(life)}
            for at, event in now.items():
                if at in seen and seen[at] != event:
                    what = f"at {at}, life {life} saw {event}, and one before it {seen[at]}"
                    report.differences.append(Difference("lives disagree", what))
                    break
            seen = {**seen, **now}
        self._check_repetitions(report)

    def _seen_in(self, life: int) -> list[dict[str, Any]]:
        """Return what a life saw and recorded."""
        found: list[dict[str, Any]] = []
        for line in self.lines:
            if line["life"] != life:
                continue
            if line["what"] == "stop":
                break
            if line["what"] == "saw":
                found.append(line)
        while found and found[-1]["event"][3]:
            found.pop()
        return found

    def _check_repetitions(self, report: Report) -> None:
        """Look for calls whose outcome was recorded, and for those of what was torn down."""
        over: dict[str, str] = {}
        #: By branch: what was cancelled there; it is recorded when something after it is.
        cancelled: dict[tuple[int, str], list[str]] = {}
        cleaned: set[str] = set()
        stopping: set[int] = set()
        for line in self.lines:
            at, what = line["at"], line["what"]
            if what == "stop":
                stopping.add(line["life"])
            elif what == "saw" and line["life"] not in stopping:
                branch = (line["life"], at.rpartition("|")[0])
                if line["event"][1] == "cancelled":
                    cancelled.setdefault(branch, []).append(_place(line))
                elif line["event"][1] in ("value", "error", "answer"):
                    over[_place(line)] = "called again"
                    over |= dict.fromkeys(cancelled.pop(branch, ()), "cancelled, and called again")
            elif what == "call":
                torn = "torn down and resumed" if cleaned & _around(at) else ""
                if category := over.get(at, torn):
                    report.differences.append(Difference(category, f"{line}"))
                cleaned |= _cleaned_by(at)

    def check_replay(self, report: Report) -> None:
        """Compare the last life, which replays the whole history, with the one before it."""
        ends = [line for line in self.lines if line["what"] == "end" and line["at"] == "run"]
        before, last = ends[0], ends[-1]
        if before["ended"] != last["ended"]:
            what = f"ended as {before['ended']}, and replayed as {last['ended']}"
            report.differences.append(Difference("replay: result", what))
        for text in _trace_differences(before["trace"], last["trace"], volatile=True):
            report.differences.append(Difference("replay: trace", text))
        again = [
            line for line in self.lines if line["what"] == "call" and line["life"] == last["life"]
        ]
        if len(ends) > 1 and again:
            report.differences.append(Difference("replay: calls", f"{len(again)}: {again[0]}"))


def _around(at: str) -> set[str]:
    """Return the places whose ``finally`` comes after a call at this place, of the same branch."""
    parts = at.split(".body")
    found = {".body".join(parts[:number]) for number in range(1, len(parts))}
    branch, _, path = at.rpartition("|")
    return found if path.startswith(".finish") else {*found, f"{branch}|"}


def _cleaned_by(at: str) -> set[str]:
    """Return the place whose ``finally``, or whose last step, a call is a part of."""
    path = at.rpartition("|")[2]
    return {at[: at.rindex(word)] for word in (".finally", ".finish") if word in path}


def _check_twins(whole: Ledger, other: Ledger, report: Report) -> None:
    """Compare the two runs of a program that does not depend on order."""
    if whole.result != other.result:
        what = f"undisturbed: {whole.result}; disturbed: {other.result}"
        report.differences.append(Difference("result", what))
    ends, others = whole.ends(), other.ends()
    for key in sorted(ends.keys() | others.keys()):
        if key not in ends or key not in others:
            which = "undisturbed" if key in ends else "disturbed"
            report.differences.append(Difference("workflows", f"{key} ended only {which}"))
            continue
        if ends[key]["ended"] != others[key]["ended"]:
            what = f"{key} {ends[key]['ended']}, and disturbed {others[key]['ended']}"
            report.differences.append(Difference("end of a workflow", what))
        for text in _trace_differences(ends[key]["trace"], others[key]["trace"], volatile=False):
            report.differences.append(Difference("trace", text))
    missing, extra = (
        whole.calls().keys() - other.calls().keys(),
        other.calls().keys() - whole.calls().keys(),
    )
    for call in sorted(missing):
        report.differences.append(Difference("calls missing", f"{call}"))
    for call in sorted(extra):
        report.differences.append(Difference("calls added", f"{call}"))


def _trace_differences(
    one: dict[str, list[Any]], two: dict[str, list[Any]], *, volatile: bool
) -> list[str]:
    """Return the first difference of each branch of two traces."""
    found = []
    for key in sorted(one.keys() | two.keys()):
        left, right = (_comparable(each.get(key, []), volatile) for each in (one, two))
        for number in range(max(len(left), len(right))):
            pair = [events[number] if number < len(events) else None for events in (left, right)]
            if pair[0] != pair[1]:
                found.append(f"branch {key}, event {number}: {pair[0]}, and {pair[1]}")
                break
    return found


def _comparable(events: list[Any], volatile: bool) -> list[Any]:
    return [
        [path, how, shown if volatile or not is_volatile else ""]
        for path, how, shown, is_volatile in events
    ]
