"""What may be asked of a run from outside: an answer, a retry, an end, a fork.

All of it is durable when it returns, and needs the store alone: so the command line can do what a
program can, without its code.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import run_entries as entries
from maestro_hive.hive import shapes, under_way, watch
from maestro_hive.hive.mail import Answer, Mail
from maestro_hive.hive.run_reading import find_run, read_run
from maestro_hive.hive.waiting import fitting
from maestro_hive.kernel.errors import ConfigurationError, FencedError, RunHeldError
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.run_state import facts_of, fold
from maestro_hive.maestro.state.run_view import OVER, open_waits, run_status
from maestro_hive.maestro.state.step_view import find_step
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.run_state import RunState, StepState
    from maestro_hive.maestro.state.store import Hold, Store

_PENDING = "pending"


# --- answers --------------------------------------------------------------------------------------


def answer(
    store: Store, run_id: str, name: str, value: Any, *, by: str | None = None, early: bool = False
) -> None:
    """Answer a question of a run; with ``early``, also one that it has not asked yet.

    A question takes one answer. One that is not of the kind that was asked for is refused here,
    where it can be mended.
    """
    question = find_question(store, run_id, name, early=early)
    _post(store, run_id, question, Answer(name=name, value=fitting(question, name, value), by=by))


def answer_in_words(
    store: Store, run_id: str, name: str, text: str, *, by: str | None = None, early: bool = False
) -> None:
    """Answer as somebody types it: ``yes`` is a text to one question, and true to another."""
    question = find_question(store, run_id, name, early=early)
    if question is None:
        _post(store, run_id, None, Answer(name=name, value=text, by=by, words=True))
        return
    shape = facts_of(question).get("shape") or {}
    value = shapes.parse_words(shape, text, f"the answer to {name!r}")
    _post(store, run_id, question, Answer(name=name, value=value, by=by))


def _post(store: Store, run_id: str, question: Entry | None, given: Answer) -> None:
    asked = question.identity if question is not None else None
    letter = replace(given, question=asked.hex() if asked is not None else None)
    Mail(store).answer(run_id, letter)
    watch.look_soon(store)


def find_question(store: Store, run_id: str, name: str, *, early: bool) -> Entry | None:
    """Return what a run asks under this name; None if nothing yet, and that is ``early`` enough."""
    state = read_run(store, run_id)
    if state.ended is not None:
        raise ConfigurationError(
            f"run {run_id!r} is over ({run_status(state)}), and waits for no answer"
        )
    answered = {each.question for each in Mail(store).letters(run_id).answers}
    asked = [each for each in open_waits(state) if facts_of(each).get("name") == name]
    left = [each for each in asked if each.identity and each.identity.hex() not in answered]
    if left or (early and not asked):
        return left[0] if left else None
    if asked:
        return asked[0]  # has its answer, and whoever posts another is told so
    raise ConfigurationError(
        f"run {run_id!r} does not wait for {name!r}{_what_instead(state)};"
        " an answer for later is given with early (--early)"
    )


def _what_instead(state: RunState) -> str:
    names = [str(facts_of(each).get("name")) for each in open_waits(state)]
    return f"; it waits for {', '.join(map(repr, names))}" if names else ", nor for anything else"


# --- trying again ---------------------------------------------------------------------------------


def retry(store: Store, run_id: str, step: str | int | None = None) -> None:
    """Let what failed be tried again, in the run and its children, or one step alone.

    What is kept stays kept. The run goes on when somebody resumes it.
    """
    find_run(store, run_id)
    with _alone_with(store, run_id) as run:
        state = run.state
        if run_status(state) == entries.SUCCESS:
            raise ConfigurationError(f"run {run_id!r} has succeeded: there is nothing to retry")
        identity = None if step is None else step_of(state, run_id, step).identity
        if identity is not None and state.ended is not None:
            raise ConfigurationError(
                f"run {run_id!r} is over ({run_status(state)}): retry the whole of it"
            )
        for child in state.children.values() if identity is None else ():
            _retry_child(store, str(facts_of(child).get("run_id")))
        Mail(store).settle(run_id, entries.FAILED)  # and with it a request to cancel
        retried = NewEntry(EntryKind.RETRIED, identity=identity)
        run.append(retried, _PENDING if state.begun is not None else None)


def _retry_child(store: Store, run_id: str) -> None:
    record = store.run(run_id)
    if record is not None and record.status != entries.SUCCESS:
        retry(store, run_id)


def step_of(state: RunState, run_id: str, wanted: str | int) -> StepState:
    """Return a step by its number, its name, or ``name#2``; raise if there is none."""
    found = find_step(state, wanted)
    if found is None:
        names = ", ".join(dict.fromkeys(step.name for step in state.steps.values())) or "none"
        raise ConfigurationError(f"run {run_id!r} has no step {wanted!r}; it has: {names}")
    return found


# --- an end ---------------------------------------------------------------------------------------


def cancel(store: Store, run_id: str, reason: str = "") -> bool:
    """End a run and what it started; False if it is over already.

    A process that executes it is asked to, and will record it; otherwise it is recorded here.
    """
    if under_way.here(store, run_id) is not None:
        Mail(store).cancel(run_id, reason)
        watch.look_soon(store)
        return True
    record = find_run(store, run_id)
    if record.status in OVER:
        return False
    if not record.workflow and read_run(store, run_id).begun is None:
        raise ConfigurationError(
            f"run {run_id!r} is no workflow's: stop the program that executes it, and it ends"
        )
    try:
        with _alone_with(store, run_id) as run:
            if run.state.ended is not None:  # it came to its end just now
                return False
            for child in run.state.children.values():  # first: who is killed here can ask again
                _cancel_child(store, str(facts_of(child).get("run_id")), reason)
            ended = entries.ended(entries.CANCELLED, reason=reason or None)
            run.append(ended, entries.CANCELLED)
            Mail(store).settle(run_id, entries.CANCELLED)
    except RunHeldError:
        Mail(store).cancel(run_id, reason)
        watch.look_soon(store)
    return True


def _cancel_child(store: Store, run_id: str, reason: str) -> None:
    if store.run(run_id) is not None:
        cancel(store, run_id, reason)


# --- writing to a run that nobody executes ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Taken:
    """A run that was taken to write to it, and what it had come to by then."""

    store: Store
    hold: Hold
    state: RunState

    def append(self, entry: NewEntry, status: str | None) -> None:
        """Record an entry, durably."""
        (written,) = self.store.append([Append(self.hold, [entry], status)])
        if isinstance(written, FencedError):
            raise written


@contextmanager
def _alone_with(store: Store, run_id: str) -> Iterator[_Taken]:
    """Take a run that nobody executes; ``RunHeldError`` says who does."""
    hold = store.hold_run(run_id)
    try:
        if hold.users > 1:
            holder = hold.lease.holder
            raise RunHeldError(run_id, host=holder.host, pid=holder.pid, since=holder.since)
        yield _Taken(store, hold, fold(store.entries(hold.run), store.load))
    finally:
        store.release_run(hold)
