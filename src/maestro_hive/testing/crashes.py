"""A workflow killed after each of its records and resumed, next to the same one left alone.

The undisturbed run is made once. After each of its records the journal is copied as it is: that is what
a kill at this moment leaves. Then a run is resumed from each copy, at the time of it, and what the two
came to is compared: result or error, the calls of steps with their inputs, and whether the resumed
workflow asked for what is recorded. An attempt that is made again, because it was cut off, is no
difference.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.hive import resolving
from maestro_hive.hive.errors import RunCancelledError, RunFailedError
from maestro_hive.hive.runs import read_run
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.event_reader import EventReader
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import OVER, ambiguous_steps
from maestro_hive.testing.lives import KitStore, UnansweredError

if TYPE_CHECKING:
    from maestro_hive.maestro.state.records import EntriesAppended
    from maestro_hive.testing.bodies import Call, State
    from maestro_hive.testing.clock import SkippingClock
    from maestro_hive.testing.lives import Lives, Work

#: How many differences of one kind are shown.
_MOST_SHOWN = 5
_LONGEST = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """What came of ``crash_everywhere`` where nothing differed.

    ``records`` is after how many records the run was killed, ``calls`` how many steps it calls, and
    ``result`` what it returned, undisturbed; ``error`` what it failed by, where it did.
    """

    records: int
    calls: int
    result: Any
    error: str | None


class CrashDifferenceError(AssertionError):
    """A run that was killed and resumed is not what it is undisturbed.

    ``record`` is the number of the last record before the kill, and ``after`` what it says.
    """

    def __init__(self, record: int, records: int, after: str, differences: list[str]) -> None:
        lines = "\n".join(f"  - {each}" for each in differences)
        super().__init__(
            f"killed after record {record} of {records} ({after}), the resumed run differs from the"
            f" undisturbed one:\n{lines}\nA workflow may depend on its arguments and on what durable"
            " calls gave it, and on nothing else: no clock, no dice, no order of arrival."
        )
        self.record = record
        self.after = after
        self.differences = differences


class _Moment(NamedTuple):
    """What a kill after one record leaves."""

    store: KitStore
    clock: SkippingClock
    state: State
    text: str


class _Outcome(NamedTuple):
    """How a run ended: as it is compared, and as it is shown."""

    what: tuple[str, ...]
    shown: str
    value: Any = None
    error: str | None = None


class Twins:
    """One workflow, undisturbed and killed."""

    def __init__(self, lives: Lives, work: Work, *, vary_order: bool) -> None:
        self._lives = lives
        self._work = work
        self._vary_order = vary_order
        self._first = len(lives.bodies.calls)
        self._moments: list[_Moment] = []

    def compare(self) -> CrashReport:
        """Return the report, or raise the first difference; then everything is as it was."""
        __tracebackhide__ = True  # pytest shows the test, and not how it was found out
        lives = self._lives
        before = lives.store, lives.clock
        try:
            outcome = self._undisturbed()
            calls, state = self._calls(), lives.bodies.state()
            for number in range(1, len(self._moments) + 1):
                self._check(number, outcome, calls)
            lives.bodies.restore(state)
        finally:
            lives.start(*before)
        return CrashReport(
            records=len(self._moments),
            calls=len(calls),
            result=outcome.value,
            error=outcome.error,
        )

    def _undisturbed(self) -> _Outcome:
        """Run it to its end, and copy everything after each record."""
        lives = self._lives
        clock = lives.clock.copied()
        clock.holds_ends = True
        lives.start(KitStore(clock=clock, left_by=lives.store), clock)
        lives.on_record = self._note
        try:
            return self._live()
        finally:
            lives.on_record = None

    def _note(self, event: EntriesAppended) -> None:
        """Copy everything as it is after a record."""
        lives = self._lives
        clock = lives.clock.copied()
        store = KitStore(clock=clock, left_by=lives.store)
        self._moments.append(_Moment(store, clock, lives.bodies.state(), self._text(event)))

    def _text(self, event: EntriesAppended) -> str:
        """Return what was recorded, for people."""
        store = self._lives.store
        run = store.run(event.run_id)
        assert run is not None, "something was recorded of it"
        entries = store.entries(run.id, up_to=event.seq)
        reader = EventReader(event.run_id, store.load)
        reader.skip(entries[: event.first - 1])
        of = "" if event.run_id == self._work.run_id else f" of {event.run_id}"
        return "; ".join(f"{reader.read(each)}{of}" for each in entries[event.first - 1 :])

    def _live(self) -> _Outcome:
        """Run or resume it to its end."""
        try:
            value = self._lives.live(self._work)
        except RunFailedError as error:
            text = f"{error.error_type}: {error.error_message}"
            return _Outcome(("raised", text), f"raised {_short(text)}", error=text)
        except RunCancelledError as error:
            return _Outcome(("cancelled", error.reason), f"was cancelled ({error.reason})")
        encoded = codec.encode(value, "the result").data
        return _Outcome(("returned", encoded.hex()), f"returned {_short(repr(value))}", value)

    def _resumed(self, moment: _Moment) -> _Outcome:
        """Resume it from what a kill left."""
        moment.clock.last_first = self._vary_order
        self._lives.bodies.restore(moment.state)
        self._lives.start(moment.store, moment.clock)
        _settle_ambiguous(moment.store)
        try:
            return self._live()
        except (MaestroError, UnansweredError) as error:
            text = f"is suspended by {type(error).__name__}: {error}"
            return _Outcome(("suspended", text), _short(text))

    def _calls(self) -> dict[tuple[str, bytes], Call]:
        """Return the durable calls of steps, each once, however many attempts it had."""
        return {
            (call.run_id, call.identity): call for call in self._lives.bodies.calls[self._first :]
        }

    def _check(self, number: int, outcome: _Outcome, calls: dict[Any, Call]) -> None:
        """Raise if the run that was killed after this record differs."""
        __tracebackhide__ = True
        moment = self._moments[number - 1]
        resumed = self._resumed(moment)
        differences = [*_different_calls(self._calls(), calls), *self._other_ways()]
        if resumed.what != outcome.what:
            differences.append(f"it {resumed.shown}; undisturbed, it {outcome.shown}")
        if differences:
            raise CrashDifferenceError(number, len(self._moments), moment.text, differences)

    def _other_ways(self) -> list[str]:
        """Return what the resumed workflows did not ask for again, or asked for and is not recorded."""
        store, found = self._lives.store, []
        for run in store.runs():
            for entry in store.entries(run.id):
                if entry.kind == EntryKind.REPLAY_DIFFERED:
                    facts = facts_of(entry)
                    for key, text in (
                        ("missing", "did not ask again for"),
                        ("new", "asked for what is not recorded:"),
                    ):
                        if facts.get(key):
                            found.append(f"it {text} {', '.join(facts[key])} (run {run.name})")
        return found[:_MOST_SHOWN]


def _settle_ambiguous(store: KitStore) -> None:
    """Be the person who says that a step that was cut off is to be executed again."""
    for run in store.runs():
        if run.status not in OVER:
            for step in ambiguous_steps(read_run(store, run.name), held=False):
                resolving.rerun(store, run.name, step.number)


def _different_calls(resumed: dict[Any, Call], undisturbed: dict[Any, Call]) -> list[str]:
    """Return which calls only one of the two made; equal calls are counted."""
    here, there = _counted(resumed), _counted(undisturbed)
    shown = {_content(each): str(each) for each in (*resumed.values(), *undisturbed.values())}
    only_here = [
        f"it called {shown[each]}, which is not called undisturbed" for each in here - there
    ]
    only_there = [
        f"it did not call {shown[each]}, which is called undisturbed" for each in there - here
    ]
    return only_here[:_MOST_SHOWN] + only_there[:_MOST_SHOWN]


def _counted(calls: dict[Any, Call]) -> Counter[tuple[str, str, bytes]]:
    return Counter(map(_content, calls.values()))


def _content(call: Call) -> tuple[str, str, bytes]:
    return call.run_id, call.step, call.digest


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
