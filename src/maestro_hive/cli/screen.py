"""Lines at the bottom of a terminal that stay up to date; what is printed meanwhile scrolls above them.

They are painted by a thread of its own: a terminal that takes nothing, after Ctrl+S or over a slow line,
delays the painting alone. Nothing of the terminal is changed that would have to be restored: a process
that is killed leaves lines behind, and no more.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Self

import click

from maestro_hive.cli import output

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import TextIO

#: How often it is looked whether the lines are others, in seconds.
_SECONDS = 0.2
#: How long the end waits for a terminal that takes nothing.
_END_SECONDS = 1.0
#: How many printed lines are repeated, at most, when the terminal has another size.
_MOST_REPEATED = 300

_UP, _CLEAR_REST, _CLEAR_BELOW, _CLEAR_ALL = "\x1b[{}F", "\x1b[K", "\x1b[J", "\x1b[H\x1b[2J"


class Screen:
    """Shows what ``draw`` returns for a number of columns and lines, until its block is left.

    Meanwhile what is printed to stdout, and to stderr if that is a terminal too, is printed above.
    """

    def __init__(self, draw: Callable[[int, int], list[str]]) -> None:
        self._draw = draw
        self._stdout = sys.stdout
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._lock = threading.Lock()
        #: What was printed, and is not painted yet.
        self._above: list[str] = []
        self._printed: deque[str] = deque(maxlen=_MOST_REPEATED)
        self._painted: list[str] = []
        self._size: os.terminal_size | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._paint_on, name="maestro-screen", daemon=True)
        self._streams = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stdout.flush()
        if sys.stderr.isatty():
            above = self._streams.enter_context(_Above(self.print_above, sys.stderr))
            self._streams.enter_context(contextlib.redirect_stderr(above))
        above = self._streams.enter_context(_Above(self.print_above, self._stdout))
        self._streams.enter_context(contextlib.redirect_stdout(above))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.close()
        self._closing.set()
        self._thread.join(_END_SECONDS)

    def print_above(self, line: str) -> None:
        """Print a line above the others, soon."""
        with self._lock:
            self._above.append(line)

    def _paint_on(self) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            while not self._closing.wait(_SECONDS):
                self._paint(self._draw)
            self._paint(lambda _columns, _lines: [])

    def _paint(self, draw: Callable[[int, int], list[str]]) -> None:
        size = _size_of(self._stdout.fileno())
        is_resized = self._size is not None and size != self._size
        with self._lock:
            above, self._above = self._above, []
        lines = draw(size.columns, size.lines)
        if not above and not is_resized and lines == self._painted:
            return
        if is_resized:
            # Some terminals wrap lines again and others cut them: where ours are is not known.
            text = _CLEAR_ALL + self._repeated(size, len(lines) + len(above) + 1)
        else:
            text = _UP.format(len(self._painted)) if self._painted else ""
        text += "".join(f"{line}{_CLEAR_REST}\r\n" for line in (*above, *lines)) + _CLEAR_BELOW
        self._printed.extend(above)
        self._painted, self._size = lines, size
        self._write(text)

    def _repeated(self, size: os.terminal_size, taken: int) -> str:
        """Return the last lines that were printed, as many as there is room for."""
        found: deque[str] = deque()
        room = size.lines - taken
        for line in reversed(self._printed):
            room -= max(1, -(-output.cell_width(line) // max(1, size.columns)))
            if room < 0:
                break
            found.appendleft(f"{line}\r\n")
        return "".join(found)

    def _write(self, text: str) -> None:
        """Write to the terminal itself: a buffer that is locked would prevent the end of the process."""
        left = memoryview(text.encode(self._encoding, "backslashreplace"))
        while left:
            left = left[os.write(self._stdout.fileno(), left) :]


def _size_of(terminal: int) -> os.terminal_size:
    """Return the size of a terminal; one that does not know it has that of old ones."""
    columns, lines = os.get_terminal_size(terminal)
    return os.terminal_size((columns or 80, lines or 24))


class _Above(io.TextIOBase):
    """A stream whose lines are printed above: without what would control the terminal."""

    def __init__(self, print_above: Callable[[str], None], stream: TextIO) -> None:
        self._print = print_above
        self._stream = stream
        self._line = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return that of the stream."""
        return self._stream.encoding

    def fileno(self) -> int:
        """Return that of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return True: it is a terminal."""
        return True

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Print the lines that are complete."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._print(output.printable(click.unstyle(line)).expandtabs())
        return len(text)

    def close(self) -> None:
        """Print a line that was not ended. The stream is not closed: it is another's."""
        if self._line:
            self.write("\n")
