"""Runs a program twice, undisturbed and disturbed, and compares the two.

**The undisturbed run** is one process to its end. **The disturbed run** has up to five lives that
are stopped or killed, then one in which the workflow ends and the process is killed before that is
recorded, and then one that replays the whole history. Questions are answered from outside by their
subjects, and a run that waits to be cancelled is cancelled from outside.

With ``worker``, the disturbed run is enqueued, and each of its lives is a worker, which also
releases it from memory whenever it only waits, and takes it again: so one process executes it
several times.

The comparison, and why it is sound:

1. In each run, what the workflow got at a place is what the body there returned or raised: a swap
   of equal calls, another order or a lost cause shows, also where all lives have it.
2. In the disturbed run, a later life sees at each position of each branch what an earlier one saw
   there. What an earlier life saw was recorded before; not so the clock and the dice until another
   outcome was recorded after them, nor anything after a polite stop: these are left out.
3. The replay sees exactly what the life before it saw, ends in the same way, and calls no step: all
   outcomes are recorded. Only children that were cancelled, and not awaited, may still clean up.
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
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from faults.twin import program
from faults.twin.processes import HANGS, Processes
from faults.twin.program import RUN, is_clean_up, open_hive
from faults.twin.programs import all_nodes, is_ordered
from faults.twin.values import KINDS
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from faults.twin.programs import Node
    from maestro_hive.hive.hive import Hive

#: asyncio as it is, with other concurrent nodes, on another loop, with eager tasks.
KINDS_OF_LOOP = ("asyncio", "anyio", "uvloop")
if sys.version_info >= (3, 12):
    KINDS_OF_LOOP += ("eager",)
#: How many times longer a worker's sleeps are, and seconds to its answers: it releases the run.
_SLOWNESS, _ANSWER_SECONDS = 6.0, 0.12
_POLL_SECONDS = 0.02
_KILLED = -9
_SHOWN = 400
#: How often a program is run again if it was cancelled at the wrong moment.
_TRIES = 4


class Kind(NamedTuple):
    """How programs are executed."""

    loop: str = "asyncio"
    #: Whether the disturbed run is enqueued for workers.
    worker: bool = False
    sabotage: str = ""


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
    kind: Kind = field(default_factory=Kind)

    @property
    def categories(self) -> set[str]:
        """The kinds of differences."""
        return {each.category for each in self.differences}


def compare(spec: Node, folder: Path, processes: Processes, kind: Kind) -> Report:
    """Run a program undisturbed and disturbed, and return the differences."""
    report = _compare(spec, folder, processes, kind)
    for _ in range(_TRIES - 1):
        if not report.is_void:
            break
        report = _compare(spec, folder, processes, kind)
    if report.is_void:
        report.differences.clear()
    return report


def _compare(spec: Node, folder: Path, processes: Processes, kind: Kind) -> Report:
    started = time.monotonic()
    report = Report(spec, kind=kind)
    shutil.rmtree(folder, ignore_errors=True)
    undisturbed = _Twin(folder / "undisturbed", spec, processes, report)
    disturbed = _Twin(folder / "disturbed", spec, processes, report)
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

    def __init__(self, folder: Path, spec: Node, processes: Processes, report: Report) -> None:
        self._folder = folder
        self._spec = spec
        self._processes = processes
        self._report = report
        self._lives = 0
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
        if self._report.kind.worker:
            options |= {"slowness": _SLOWNESS, "worker": True}
            with open_hive(self._folder) as hive:
                hive.enqueue("main", KINDS[self._spec["input"]](7), run_id=RUN)
        with _Attendant(self._folder, self._spec, self._report) as self._attendant:
            for stop in self._spec["stops"]:
                number = self.read().number_of_stop(stop, whole)
                code = self._live(**options, stop={**stop, "number": number}, die_at_end=True)
                self._note_landing()
                if code not in (_KILLED, *program.STOPPED.values()):
                    return self._fail("disturbed", code)
                if self.read().has_ended:
                    break
                time.sleep(stop.get("pause", 0))
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
        kind = self._report.kind
        given = {"worker": False, "kind": kind.loop, "sabotage": kind.sabotage, **options}
        pid = self._processes.start(self._folder, life=self._lives, **given)
        self._attendant.process = pid
        return self._processes.wait(pid)

    def _fail(self, which: str, code: int) -> bool:
        how = "it hangs" if code == HANGS else f"it ended with {code}"
        how += "" if self.read().has_ended else ", and the workflow did not come to its end"
        errors = self._folder / "errors"
        text = errors.read_text()[-1500:] if errors.exists() else ""
        last = self.read().lines[-1:]
        what = f"{which}: {how}; the last line is {last}; {text[-_SHOWN:]}"
        category = {0: "no clean-up", HANGS: "hang"}.get(code, "crash")
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


# --- answers and cancellations from outside -------------------------------------------------------


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
        with open_hive(self._folder) as hive:
            pause = _ANSWER_SECONDS if self._report.kind.worker else _POLL_SECONDS
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


# --- ledgers --------------------------------------------------------------------------------------


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
        if "number" in stop:
            return int(stop["number"])
        seen = {_place(line) for line in self.lines if line["what"] == "saw"}
        called = [line["at"] for line in whole.lines if line["what"] == "call"]
        left = sum(at not in seen for at in called)
        match stop["on"]:
            case "line":
                left = len(whole.lines) - 2 * (len(called) - left)
            case "commit":
                result = next(line for line in whole.lines if line["what"] == "result")
                left = result["commits"] * left // max(1, len(called))
            case "clean-up":
                left = sum(is_clean_up(at) for at in called if at not in seen)
            case _:  # a call
                pass
        part: float = stop["part"]
        return max(1, math.ceil(part * left))

    def calls(self) -> dict[tuple[str, str, str], list[str]]:
        """Return the effect keys of the calls, by place, step and input."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for line in self.lines:
            if line["what"] == "call" and line["step"] != "stuck":  # cancelled before, perhaps
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
            if line["what"] == "stop" and _stops(line, life):
                break
            if line["life"] == life and line["what"] == "saw":
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
        stops: list[dict[str, Any]] = []
        for line in self.lines:
            at, what, life = line["at"], line["what"], line["life"]
            if what == "stop":
                stops.append(line)
            elif what == "saw" and not any(_stops(each, life) for each in stops):
                branch = (life, at.rpartition("|")[0])
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
        again = [line for line in self._calls_in(last["life"]) if not self._is_left(line)]
        if len(ends) > 1 and again:
            report.differences.append(Difference("replay: calls", f"{len(again)}: {again[0]}"))

    def _calls_in(self, life: int) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["what"] == "call" and line["life"] == life]

    def _is_left(self, call: dict[str, Any]) -> bool:
        """Return whether a child that its parent has left had not ended before this call."""
        runs = {line["run"] for line in self.lines if line["what"] == "saw"} - {"run"}
        own = max((each for each in runs if call["at"].startswith(each)), key=len, default="run")
        ends = [line for line in self.lines if line["what"] == "end" and line["at"] == own]
        return own != "run" and all(line["life"] >= call["life"] for line in ends)


def _stops(stop: dict[str, Any], life: int) -> bool:
    """Return whether a stop ends a life: a signal ends all those of its process."""
    if stop["how"] == program.RELEASED:
        return bool(stop["life"] == life)
    return bool(stop["life"] // program.EXECUTIONS == life // program.EXECUTIONS)


def _around(at: str) -> set[str]:
    """Return the places whose ``finally`` comes after a call at this place, of the same branch."""
    parts = at.split(".body")
    found = {".body".join(parts[:number]) for number in range(1, len(parts))}
    branch, _, path = at.rpartition("|")
    return found if path.startswith(".finish") else {*found, f"{branch}|"}


def _cleaned_by(at: str) -> set[str]:
    """Return the place whose ``finally``, or whose last step, contains a call."""
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
    calls, others_calls = _compared_calls(whole), _compared_calls(other)
    missing, extra = calls - others_calls, others_calls - calls
    for call in sorted(missing):
        report.differences.append(Difference("calls missing", f"{call}"))
    for call in sorted(extra):
        report.differences.append(Difference("calls added", f"{call}"))


def _compared_calls(ledger: Ledger) -> set[tuple[str, str, str]]:
    """Return the calls; for one with a key, the place of the first of its callers may differ."""
    return {("" if step == "shared" else at, step, given) for at, step, given in ledger.calls()}


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
