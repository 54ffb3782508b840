"""Streams as readers see them: the chunks that the steps of a run wrote, with their steps' names.

A reader that drops what it has of a step whenever the step starts over has, when the stream is
over, exactly what the last attempt wrote: an outcome is recorded after all chunks of its attempt,
and here it is read before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.kernel.clock import from_micros
from maestro_hive.maestro.state.projections import RunState, find_step, labels
from maestro_hive.maestro.state.records import ChunkKind
from maestro_hive.maestro.state.views import plain_values, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.records import Chunk, RunRecord
    from maestro_hive.maestro.state.store import Reader
    from maestro_hive.maestro.state.strict_json import Json

#: How many chunks are read at a time.
_AT_A_TIME = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """One chunk of what a step wrote, or, without data, that the step starts over."""

    run_id: str
    #: The step's name, or ``name#2`` for the second step of that name.
    step: str
    attempt: int
    #: Its number among all chunks of the run: reading goes on ``after`` it.
    seq: int
    at: datetime
    #: What was written, a text or bytes.
    data: str | bytes
    #: Whether a new attempt starts here: what the step wrote before no longer counts.
    restarted: bool


class StreamReader:
    """The stream of a run, or of one of its steps, in batches; it blocks, and never waits.

    ``step`` is a number, a name or ``name#2``, and need not have started. With ``newest`` the chunks
    of attempts are left out that are superseded when reading starts. With ``continues``
    the steps of a name are read as one, under that name: it says by the result of one of them whether
    another one follows.
    """

    def __init__(
        self,
        reader: Reader,
        run: RunRecord,
        step: str | int | None = None,
        after: int = 0,
        *,
        newest: bool = False,
        continues: Callable[[Json], bool] | None = None,
    ) -> None:
        self.run = run
        self.state = RunState()
        #: Whether all chunks were returned, and the step, or the run, has its outcome.
        self.is_over = False
        #: Whether there may be further chunks already.
        self.has_more = True
        self._reader = reader
        self._load = plain_values(reader.load)
        self._wanted = step
        self._continues = continues
        self._after = after
        #: The first attempt of each step that is read, by number; None: not known yet.
        self._first: dict[int, int] | None = None if newest else {}
        self._labels: dict[int, str] = {}
        self._step: StepState | None = None

    def next_batch(self) -> list[StreamChunk]:
        """Return the chunks that follow the last batch; none, also if they are all of other steps."""
        self._read_entries()
        if self._first is None:
            self._first = {step.number: step.last_attempt for step in self.state.steps.values()}
        over, first = self._has_outcome(), self._first
        found = self._reader.chunks(self.run.id, self._after, _AT_A_TIME)
        if any(chunk.step not in self.state.steps for chunk in found):
            self._read_entries()  # they started meanwhile
        self.has_more = len(found) == _AT_A_TIME
        self.is_over = over and not self.has_more
        if found:
            self._after = found[-1].seq
        wanted = self.step()
        return [
            self._shown(chunk)
            for chunk in found
            if chunk.attempt >= first.get(chunk.step, 0) and self._is_wanted(chunk, wanted)
        ]

    def step(self) -> StepState | None:
        """Return the step that is read, the last of several, if it has started; None if all are."""
        if self._step is None and self._wanted is not None:
            found = list(self._of_name(str(self._wanted)))
            self._step = found[-1] if found else find_step(self.state, self._wanted)
        return self._step

    def _of_name(self, name: str) -> Iterator[StepState]:
        """Yield the steps that are read as one under this name."""
        if self._continues is not None:
            yield from (step for step in self.state.steps.values() if step.name == name)

    def is_writing(self, label: str) -> bool:
        """Return whether an attempt of a step may write more, as of what was read."""
        step = find_step(self.state, label)
        steps = [*self._of_name(label)] or ([] if step is None else [step])
        return self.state.ended is None and any(each.open_attempt > 0 for each in steps)

    def _read_entries(self) -> None:
        new = self._reader.entries(self.run.id, self.state.seq)
        if new:
            known = len(self.state.steps), self.state.restored_seq
            self.state.add_all(new, self._load)
            if known != (len(self.state.steps), self.state.restored_seq):
                self._labels, self._step = labels(self.state), None
                if self._continues is not None:
                    self._labels = {each.number: each.name for each in self.state.steps.values()}

    def _has_outcome(self) -> bool:
        if self.state.ended is not None:
            return True
        step = self.step()
        if step is None or step.completed is None:
            return step is not None and step.identity in self.state.outcomes
        return self._continues is None or not self._continues(value_of(step.completed, self._load))

    def _is_wanted(self, chunk: Chunk, wanted: StepState | None) -> bool:
        step = self.state.steps.get(chunk.step)
        if step is None:
            return False  # of a run that was reset since: its entries no longer count
        is_one_of = self._continues is not None and step.name == self._wanted
        return self._wanted is None or step is wanted or is_one_of

    def _shown(self, chunk: Chunk) -> StreamChunk:
        is_bytes = chunk.kind == ChunkKind.BYTES
        return StreamChunk(
            run_id=self.run.name,
            step=self._labels[chunk.step],
            attempt=chunk.attempt,
            seq=chunk.seq,
            at=from_micros(chunk.at),
            data=chunk.data if is_bytes else chunk.data.decode(),
            restarted=chunk.kind == ChunkKind.RESTARTED,
        )
