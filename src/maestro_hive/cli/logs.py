"""``maestro logs``: what the steps of a run wrote, and what they write now."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import click

from maestro_hive.admin.streams import StreamFeed
from maestro_hive.cli import output
from maestro_hive.cli.command import run_ids, verb
from maestro_hive.cli.events import ending_code
from maestro_hive.kernel.redacted_text import RedactedText
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from codecs import IncrementalDecoder
    from collections.abc import Callable, Sequence

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

    What a step wrote by current().write, as it is, but for secrets: a word is printed when its end
    is written, so that one in two parts is recognized, too. STEP is a step's number, its name, or
    name#2; a task's id in a team run means all of it, before and after its answers. Without it, a
    line "==> STEP <==" is printed where another step continues. What attempts before the latest
    wrote is left out, and a note says when a step starts over. With --follow it continues until the
    step or the run ends, or nobody executes it; when that is, and the exit codes, are those of
    'maestro events --follow'. With --json each line is an object with the keys run_id, step,
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
            printer.release(feed.is_writing)
            if feed.has_more:
                continue
            if ending is not None or not follow:
                printer.release(lambda _: False)
                printer.end()
                feed.check_step()
                return ending_code(run_id, ending) if follow and ending is not None else None
            time.sleep(_POLL_SECONDS)


class _Printer(ABC):
    """Prints chunks; what a step wrote last is held back while it may be a part of a secret."""

    def __init__(self) -> None:
        self._texts: dict[str, RedactedText] = {}

    def _text_of(self, step: str) -> RedactedText:
        return self._texts.setdefault(step, RedactedText(output.redacted))

    def release(self, is_writing: Callable[[str], bool]) -> None:
        """Print what is held back of the steps that write no more."""
        for step, text in list(self._texts.items()):
            if text.held and not is_writing(step):
                self._release(step)

    @abstractmethod
    def _release(self, step: str) -> None:
        """Print what is held back of a step."""


class _Objects(_Printer):
    """Prints chunks as lines of JSON."""

    def __init__(self) -> None:
        super().__init__()
        #: Those that are held back, by step.
        self._held: dict[str, list[StreamChunk]] = {}

    def print(self, chunks: Sequence[StreamChunk]) -> None:
        """Print some; a chunk is held back until all of its words are whole."""
        lines: list[StreamChunk] = []
        whole: dict[str, int] = {}
        for chunk in chunks:
            if isinstance(chunk.data, bytes) or chunk.restarted or output.keeps_values():
                lines += [*self._released(chunk.step, None), chunk]
                whole.pop(chunk.step, None)
                continue
            self._held.setdefault(chunk.step, []).append(chunk)
            whole[chunk.step] = self._text_of(chunk.step).add(chunk.data)
        for step, count in whole.items():
            lines += self._released(step, count)
        _print_objects(sorted(lines, key=attrgetter("seq")))

    def _released(self, step: str, count: int | None) -> list[StreamChunk]:
        """Return the chunks within so many characters, or all, without secrets."""
        held, raw = self._held.get(step, []), ""
        number = 0
        for chunk in held:
            assert isinstance(chunk.data, str)
            if count is not None and len(raw) + len(chunk.data) > count:
                break
            raw, number = raw + chunk.data, number + 1
        if not number:
            return []
        found, self._held[step] = held[:number], held[number:]
        return _showing(found, self._text_of(step).release(len(raw)))

    def _release(self, step: str) -> None:
        _print_objects(self._released(step, None))

    def end(self) -> None:
        """Do nothing."""


def _showing(chunks: list[StreamChunk], text: str) -> list[StreamChunk]:
    """Return chunks that are this text together; a secret is replaced in the first that has a part."""
    data = [str(each.data) for each in chunks]
    first, last = 0, len(data)
    while first < last and text.startswith(data[first]):
        text, first = text[len(data[first]) :], first + 1
    while first < last and text.endswith(data[last - 1]):
        text, last = text[: len(text) - len(data[last - 1])], last - 1
    data[first:last] = [text, *[""] * (last - first - 1)] if first < last else []
    return [replace(each, data=own) for each, own in zip(chunks, data, strict=True)]


def _print_objects(chunks: Sequence[StreamChunk]) -> None:
    if chunks:
        click.echo("\n".join(output.to_json(to_dict(chunk)) for chunk in chunks))


class _Texts(_Printer):
    """Prints what was written, as it is."""

    def __init__(self, *, headings: bool) -> None:
        super().__init__()
        self._headings = headings
        self._step: str | None = None
        self._printed: set[str] = set()
        self._is_new_line = True
        #: By step: a character may be in two chunks of bytes.
        self._decoders: dict[str, IncrementalDecoder] = {}

    def print(self, chunks: Sequence[StreamChunk]) -> None:
        """Print some; those of a step in a row at once."""
        for (step, restarted), row in groupby(chunks, lambda each: (each.step, each.restarted)):
            if restarted:
                self._say_restarted(list(row)[-1])
                continue
            texts = "".join(map(self._text, row))
            text = self._text_of(step)
            count = text.add(texts)
            self._write(step, text.release(None if output.keeps_values() else count))

    def _say_restarted(self, chunk: StreamChunk) -> None:
        self._release(chunk.step)
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

    def _release(self, step: str) -> None:
        self._write(step, self._text_of(step).release())

    def _write(self, step: str, text: str) -> None:
        if not text:
            return
        if self._headings and step != self._step:
            self._end_line()
            click.echo(f"==> {output.printable(step)} <==")
        self._step = step
        self._printed.add(step)
        text = output.printable(text)
        click.echo(text, nl=False)
        self._is_new_line = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._is_new_line:
            click.echo()
            self._is_new_line = True

    def end(self) -> None:
        """End the last line, if people read it: a file gets what was written, and no more."""
        if output.is_terminal() or self._headings:
            self._end_line()
