"""``maestro logs``: what the steps of a run wrote, and what they write now."""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING

import click

from maestro_hive.admin.streams import StreamFeed
from maestro_hive.cli import output
from maestro_hive.cli.command import run_ids, verb
from maestro_hive.cli.events import ending_code
from maestro_hive.maestro.state.run_view import to_dict

if TYPE_CHECKING:
    from codecs import IncrementalDecoder
    from collections.abc import Sequence

    from maestro_hive.cli.command import Call
    from maestro_hive.maestro.state.streams import StreamChunk

#: How often a stream that is followed is read.
_POLL_SECONDS = 0.05


@verb("logs", reads=True)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.argument("step", metavar="[STEP]", required=False)
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Continue until the step or the run ends, or nobody executes it.",
)
@click.option(
    "--after", metavar="SEQ", type=click.IntRange(min=0), default=0, help="Start after this chunk."
)
def logs_command(
    call: Call, run_id: str, step: str | None, *, follow: bool, after: int
) -> int | None:
    """Print what the steps of a run wrote, and follow it.

    What a step wrote by current().write, as it is; STEP is a step's number, its name, or name#2.
    Without it, a line "==> STEP <==" is printed where another step continues. What attempts before
    the latest wrote is left out, and a note says when a step starts over. With --follow it continues
    until the step or the run ends, or nobody executes it; when that is, and the exit codes, are those
    of 'maestro events --follow'. With --json each line is an object with the keys run_id, step,
    attempt, seq, at, data and restarted, earlier attempts included: where restarted is true, what
    the step wrote before no longer counts.

    Examples:
        maestro logs checkout-42 draft             what the step draft has written
        maestro logs checkout-42 --follow          all steps, as they write
        maestro logs checkout-42 --json            one JSON object per chunk
        maestro logs checkout-42 --after 120 -f    those after chunk 120
    """
    printer = _Objects() if call.wants_json else _Texts(headings=step is None)
    with call.reading() as reader:
        feed = StreamFeed(reader, run_id, step, after, newest=not call.wants_json)
        while True:
            found, ending = feed.next_batch()
            printer.print(found)
            if feed.has_more:
                continue
            if ending is not None or not follow:
                printer.end()
                feed.check_step()
                return ending_code(run_id, ending) if follow and ending is not None else None
            time.sleep(_POLL_SECONDS)


class _Objects:
    """Prints chunks as lines of JSON."""

    def print(self, chunks: Sequence[StreamChunk]) -> None:
        """Print some."""
        if chunks:
            click.echo("\n".join(output.to_json(to_dict(chunk)) for chunk in chunks))

    def end(self) -> None:
        """Do nothing."""


class _Texts:
    """Prints what was written, as it is."""

    def __init__(self, *, headings: bool) -> None:
        self._headings = headings
        self._step: str | None = None
        self._printed: set[str] = set()
        self._is_new_line = True
        #: By step: a character may be in two chunks of bytes.
        self._decoders: dict[str, IncrementalDecoder] = {}

    def print(self, chunks: Sequence[StreamChunk]) -> None:
        """Print some; those in a row at once."""
        texts: list[str] = []
        for chunk in chunks:
            if chunk.restarted or (self._headings and chunk.step != self._step):
                self._write(texts)
                texts = []
            if chunk.restarted:
                self._say_restarted(chunk)
                continue
            if self._headings and chunk.step != self._step:
                self._end_line()
                self._write([f"==> {chunk.step} <==\n"])
            self._step = chunk.step
            self._printed.add(chunk.step)
            texts.append(self._text(chunk))
        self._write(texts)

    def _say_restarted(self, chunk: StreamChunk) -> None:
        self._decoders.pop(chunk.step, None)
        if chunk.step in self._printed:
            self._end_line()
            output.note(f"{chunk.step} starts over: attempt {chunk.attempt}")

    def _text(self, chunk: StreamChunk) -> str:
        if isinstance(chunk.data, str):
            return chunk.data
        made = getincrementaldecoder("utf-8")
        decoder = self._decoders.setdefault(chunk.step, made("backslashreplace"))
        return decoder.decode(chunk.data)

    def _write(self, texts: Sequence[str]) -> None:
        text = output.printable("".join(texts))
        if text:
            click.echo(text, nl=False)
            self._is_new_line = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._is_new_line:
            self._write(["\n"])

    def end(self) -> None:
        """End the last line, if people read it: a file gets what was written, and no more."""
        if output.is_terminal() or self._headings:
            self._end_line()
