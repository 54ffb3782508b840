"""Pages whose programs and commands are really executed, and show what is then really seen.

A block ```` ```python name.py ```` or ```` ```toml name.toml ```` is a file of that name. In a block ```` ```console ```` the lines
after ``$`` are typed, and what they print follows. ```` ```console goes-on ```` leaves its last
command running, and ```` ```console rest ```` shows what that one prints until it ends; several
have names: ```` ```console goes-on service ````. The first process that goes on is 4711 on the page,
the next one 4712, and the port 8000 is a free one while the page is executed. Times, durations, sizes, versions, processes, random ids and the number of copies, which are written beside
the steps, may be others each time, and a line ``…`` stands for any number of lines; everything else
must be as it stands.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from docs.generate.terminal import Terminal, start_process

if TYPE_CHECKING:
    from pathlib import Path

    from docs.generate.terminal import Start

#: Where readers are, and what executes their runs, whoever executed the page.
_READERS_FOLDER, _READERS_PROCESS = "/home/you/first", "process 4711 on laptop,"
_READERS_PID, _READERS_PORT = 4711, 8000

_BLOCK = re.compile(
    r"^```(python|toml|console|json(?= ))([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

#: What differs from one time to the next, and what is compared instead.
_DIFFERS = [
    (r'(?<=")/\S+/(?=\w+\.py")', "<folder>/"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(\+00:00| UTC)?", "<time>"),
    (r"^\d\d:\d\d:\d\d\b", "<time>"),
    (r"\b\d{4}-\d\d-\d\d\b", "<day>"),
    (r"\b\d{8}T\d{6}Z\b", "<tick>"),
    (r"\b\d+(\.\d+)?(e-\d+)? (ms|s|min|h|d)( \d+ (s|min|h))?\b( ago)?|\bnow\b", "<duration>"),
    (r"\b\d+\.\d+s\b", "<duration>"),
    (r"\bprocess \d+ on \S+,", "process <pid> on <host>,"),
    (r"\bkill -9 \d+", "kill -9 <pid>"),
    (r"\bprocess \[\d+\]|\b\d{2,} on \S+", "process <pid>"),
    (r"\b[0-9a-f]{12}\b", "<id>"),
    (r"\b[0-9a-f]{16}\b", "<fingerprint>"),
    (r"\b\d+(\.\d+)? (B|kB|MB|GB)\b", "<size>"),
    (r"\b\d+\.\d+\.\d+(\.\d+)?\b", "<version>"),
    (r"-[0-9a-f]{8,12}\b", "-<id>"),
    (r"\(\d+ files?\)|\bwith \d+ cop(y|ies)\b", "<copies>"),
    (r"[ \t]+", " "),
    (r" $", ""),
]


@dataclass(frozen=True, slots=True)
class Command:
    """What is typed, and what the page says is printed then."""

    typed: str
    printed: str


def execute(page: str, folder: Path, start: Start = start_process) -> str:
    """Execute a page in a fresh folder; return it as it should be, which may be as it is."""
    execution = _Execution(Terminal(folder, start=start), folder)
    try:
        return _BLOCK.sub(execution.of_block, page)
    finally:
        execution.terminal.close()


def commands(block: str) -> list[Command]:
    """Return the commands of a console block."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    return [Command(*each) for each in zip(parts[::2], parts[1::2], strict=True)]


def is_as_printed(shown: str, printed: str) -> bool:
    """Return whether what a page shows is what was printed."""
    pattern = re.escape(steady(shown)).replace("…\\\n", "(?:.*\n)*")
    return re.fullmatch(pattern, steady(printed)) is not None


def steady(text: str) -> str:
    """Return a text with what differs from one time to the next replaced."""
    for pattern, instead in _DIFFERS:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


class _Execution:
    """A page being executed: the files it has saved, and the terminal that it types in."""

    def __init__(self, terminal: Terminal, folder: Path) -> None:
        self.folder = folder
        self.terminal = terminal
        #: Processes and ports, as the page has them, and as they are.
        self._numbers = {_READERS_PORT: _free_port()}
        self._pids = count(_READERS_PID)

    def of_block(self, block: re.Match[str]) -> str:
        """Execute a block; return it as it should be."""
        language, words, body = block[1], block[2].split(), block[3]
        match language, words:
            case "python" | "json" | "toml", [name]:
                (self.folder / name).write_text(body, encoding="utf-8")
                return block[0]
            case "toml", []:  # an excerpt
                return block[0]
            case "console", ["rest", *name]:
                text = self._shown(body, self.terminal.rest(" ".join(name)))
            case "console", ["goes-on", *name]:
                *before, last = commands(body)
                text = "".join(map(self._typed, before)) + self._left(last, " ".join(name))
            case "console", []:
                text = "".join(map(self._typed, commands(body)))
            case _:
                raise ValueError(f"this block is neither a file nor something typed:\n{block[0]}")
        return f"```{language}{block[2]}\n{text}```"

    def _typed(self, command: Command) -> str:
        printed = self.terminal.type(_replaced(command.typed, self._numbers))
        return f"$ {command.typed}\n{self._shown(command.printed, printed)}"

    def _left(self, command: Command, name: str) -> str:
        def is_enough(text: str) -> bool:
            return bool(command.printed) and is_as_printed(command.printed, self._readers(text))

        typed = _replaced(command.typed, self._numbers)
        pid, printed = self.terminal.leave(typed, is_enough, name)
        self._numbers[next(self._pids)] = pid
        return f"$ {command.typed}\n{self._shown(command.printed, printed)}"

    def _shown(self, shown: str, printed: str) -> str:
        """Return what the page should show: what it shows, if that is still true."""
        printed = self._readers(printed)
        if is_as_printed(shown, printed):
            return shown
        if "\nTraceback (most" in f"\n{printed}" and "\nTraceback (most" not in f"\n{shown}":
            raise ValueError(f"a program of this page failed:\n{printed}")
        readers = printed.replace(str(self.folder), _READERS_FOLDER)
        readers = re.sub(r"\bprocess \d+ on \S+,", _READERS_PROCESS, readers)
        return "".join(f"{line.rstrip()}\n" for line in readers.splitlines())

    def _readers(self, printed: str) -> str:
        """Return a text with the processes and ports of the page, and without colours."""
        return _replaced(
            _COLOUR.sub("", printed), {real: shown for shown, real in self._numbers.items()}
        )


def _replaced(text: str, numbers: dict[int, int]) -> str:
    """Return a text with these numbers in place of others."""
    return re.sub(r"\b\d{4,}\b", lambda found: str(numbers.get(int(found[0]), found[0])), text)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def files_of(page: str) -> dict[str, str]:
    """Return the files that a page has the reader save, by name."""
    blocks = _BLOCK.findall(page)
    return {
        words.strip(): body for language, words, body in blocks if language != "console" and words
    }
