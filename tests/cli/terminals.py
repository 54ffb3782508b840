"""A terminal that a verb is executed in: what it shows, keys, its size, and its end."""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import re
import select
import threading
import time
from typing import TYPE_CHECKING, Self

from tests.cli.processes import MAIN, environment, resize
from tests.python_processes import PythonInTerminal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PATIENCE = 60.0
_CONTROL = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|([\r\n\a])|([^\x1b\r\n\a]+)|(\x1b.?)")


class TerminalScreen:
    """What a terminal of a size shows, by the few sequences that are used; others are errors."""

    def __init__(self, lines: int, columns: int) -> None:
        self.columns, self.height = columns, lines
        self.rows: list[str] = [""]
        self._row = self._column = 0
        self.bells = 0
        self._rest = ""

    @property
    def text(self) -> str:
        """What is visible, the last lines."""
        return "\n".join(row.rstrip() for row in self.rows[-self.height :])

    def resize(self, lines: int, columns: int) -> None:
        """Have another size; lines are cut, as xterm does."""
        self.columns, self.height = columns, lines
        self.rows = [row[:columns] for row in self.rows]

    def feed(self, text: str) -> None:
        """Show what was written."""
        text = self._rest + text
        # A sequence may be torn between two reads.
        self._rest = text[text.rindex("\x1b") :] if "\x1b" in text[-16:] else ""
        if re.match(r"\x1b\[\??[0-9;]*[A-Za-z]", self._rest):
            self._rest = ""
        for found in _CONTROL.finditer(text.removesuffix(self._rest) if self._rest else text):
            arguments, final, control, plain, strange = found.groups()
            assert not strange, repr(text)
            if final:
                self._move(arguments, final)
            elif plain:
                self._put(plain)
            elif control == "\n":
                self._new_line()
            elif control == "\r":
                self._column = 0
            else:
                self.bells += 1

    def _put(self, text: str) -> None:
        for character in text:
            if self._column >= self.columns:
                self._new_line()
                self._column = 0
            row = self.rows[self._row].ljust(self._column)
            self.rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    def _new_line(self) -> None:
        self._row += 1
        if self._row == len(self.rows):
            self.rows.append("")

    def _move(self, arguments: str, final: str) -> None:
        top = max(0, len(self.rows) - self.height)
        match final:
            case "m":
                pass
            case "F":
                self._row = max(top, self._row - int(arguments or 1))
                self._column = 0
            case "K":
                self.rows[self._row] = self.rows[self._row][: self._column]
            case "J" if arguments == "2":
                self.rows[top:] = [""] * (len(self.rows) - top)
            case "J":
                self.rows[self._row] = self.rows[self._row][: self._column]
                del self.rows[self._row + 1 :]
            case "H":
                self._row, self._column = top, 0
            case _:
                raise AssertionError(f"the terminal got {arguments}{final}")


class Terminal:
    """A verb in a terminal of its own; left, it is killed if it has not ended."""

    def __init__(
        self, *arguments: str, cwd: Path, lines: int = 24, columns: int = 80, **changes: str
    ) -> None:
        self._master, inside = pty.openpty()
        resize(inside, lines, columns)
        self.screen = TerminalScreen(lines, columns)
        self.written = ""
        self._lock = threading.Condition()
        self._is_closed = False
        self._process = PythonInTerminal(
            MAIN,
            *arguments,
            terminal=inside,
            cwd=cwd,
            env=environment(**{"TERM": "xterm-256color", "CI": "", **changes}),
        )
        os.close(inside)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # no effect if it has ended
        self._process.wait()
        self.close()

    def wait_for(self, condition: Callable[[str], object]) -> str:
        """Return what the terminal shows, when that is so."""
        with self._lock:
            found = self._lock.wait_for(lambda: condition(self.screen.text), _PATIENCE)
            assert found, f"the terminal shows, after a minute:\n{self.screen.text}"
            return self.screen.text

    def type(self, keys: str) -> None:
        """Type keys."""
        os.write(self._master, keys.encode())

    def resize(self, lines: int, columns: int) -> None:
        """Give the terminal another size."""
        with self._lock:
            resize(self._master, lines, columns)
            self.screen.resize(lines, columns)

    def close(self) -> None:
        """Close the terminal, as a window is closed."""
        self._is_closed = True
        self._reader.join(_PATIENCE)
        with contextlib.suppress(OSError):
            os.close(self._master)

    def ended(self) -> int:
        """Return the exit code, when the verb has ended; all it wrote was read then."""
        code = self._process.wait(_PATIENCE)
        if not self._is_closed:
            self._reader.join(_PATIENCE)
        return code

    def _read(self) -> None:
        deadline = time.monotonic() + 2 * _PATIENCE
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while not self._is_closed and time.monotonic() < deadline:
            ready, _, _ = select.select([self._master], [], [], 0.05)
            if not ready:
                continue
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # Linux says so when the last process in the terminal is gone
                return
            with self._lock:
                text = decoder.decode(piece)
                self.written += text
                self.screen.feed(text)
                self._lock.notify_all()
