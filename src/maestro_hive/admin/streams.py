"""What the steps of a run wrote, in batches, and how following it ends."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from maestro_hive.admin.events import Ending, ending_of
from maestro_hive.admin.runs import find_run, unknown_step
from maestro_hive.hive.dispatching import belongs_to_workers
from maestro_hive.maestro.state.projections import readable
from maestro_hive.maestro.state.streams import StreamReader
from maestro_hive.team.plans import WORKFLOW, asks

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Reader
    from maestro_hive.maestro.state.streams import StreamChunk

#: How often it is checked whether the run is executed.
_CHECK_SECONDS = 0.25


class StreamFeed:
    """The stream of a run, or of one of its steps; with ``newest`` without superseded attempts.

    A task of a team run is one, although it is another step after each answer that it gets.
    """

    def __init__(
        self,
        reader: Reader,
        run_id: str,
        step: str | None = None,
        after: int = 0,
        *,
        newest: bool = False,
    ) -> None:
        self._reader = reader
        self._step = step
        self._held_at = -_CHECK_SECONDS
        run = find_run(reader, run_id)
        continues = asks if run.workflow == WORKFLOW else None
        self._stream = StreamReader(reader, run, step, after, newest=newest, continues=continues)

    @property
    def has_more(self) -> bool:
        """Whether there may be further chunks already."""
        return self._stream.has_more

    def next_batch(self) -> tuple[list[StreamChunk], Ending | None]:
        """Return the next chunks, and how following ends; None while more may come by themselves."""
        stream = self._stream
        held = self._is_held()  # first: so what a process wrote before it left is read
        with readable(stream.run.name):
            found = stream.next_batch()
        if stream.has_more or (held and not stream.is_over):
            return found, None
        step = stream.step()
        if step is not None and stream.state.ended is None and stream.is_over:
            return found, Ending.FAILED if step.completed is None else Ending.COMPLETED
        return found, ending_of(self._reader, stream.run, stream.state)

    def is_writing(self, step: str) -> bool:
        """Return whether a step may write more after the last batch, before it is tried again."""
        return self._stream.has_more or self._stream.is_writing(step)

    def _is_held(self) -> bool:
        """Return whether a process executes the run, or will; yes is not asked again for a moment."""
        if monotonic() - self._held_at >= _CHECK_SECONDS:
            name = self._stream.run.name
            if name not in self._reader.run_leases() and not belongs_to_workers(self._reader, name):
                return False
            self._held_at = monotonic()
        return True

    def check_step(self) -> None:
        """Raise if the run has no such step, as far as was read."""
        if self._step is not None and self._stream.step() is None:
            stream = self._stream
            raise unknown_step(stream.run, self._step, stream.state, self._reader.load)
