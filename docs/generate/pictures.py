"""``docs/pictures``: what verbs show in a terminal, in colours, drawn from what they really print."""

from __future__ import annotations

import html
import io
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from docs.generate.executed_page import files_of, steady
from docs.generate.terminal import Terminal, start_process

if TYPE_CHECKING:
    from docs.generate.terminal import Start

_COLUMNS = 88

#: Runs that failed, wait and were left, beside the one of the README.
_SCENE = """\
import asyncio, os
from maestro_hive import ExecutionConfig, Hive, RunFailedError
from maestro_hive.unified_execution import Level1Config, Level2Config

once = ExecutionConfig(level1=Level1Config(max_attempts=1), level2=Level2Config(max_attempts=1))
hive = Hive("state", once)

@hive.step(persona="operator")
def upload(package: str) -> str:
    raise ConnectionError("the server hung up")

@hive.workflow
async def deploy(package: str) -> str:
    return await upload(package)

@hive.workflow
async def release(version: str) -> bool:
    return await hive.wait_for("approve", type=bool)

@hive.workflow
async def nightly() -> None:
    await hive.sleep(8 * 3600)

async def main() -> None:
    try:
        await hive.run(deploy, "shop-1.4.tar", run_id="deploy-14")
    except RunFailedError:
        await hive.start(nightly, run_id="nightly-1")
        await asyncio.sleep(0.5)
        await hive.start(release, "1.4", run_id="release-14")
        while not hive.runs("waiting"):
            await asyncio.sleep(0.02)
    os._exit(0)

asyncio.run(main())
"""

#: The pictures, by name, and the command that each is of.
COMMANDS = {"runs": "maestro runs", "show": "maestro show checkout-42"}
#: The one that takes a quarter of a minute, and whose tasks may end in another order each time.
DEMO = "maestro demo"
#: How long it may take on a busy machine.
_DEMO_SECONDS = 240.0


def seen(readme: str, start: Start = start_process) -> dict[str, str]:
    """Return what the commands print, with colours, where the README's program has run."""
    with tempfile.TemporaryDirectory(prefix="maestro-pictures-") as name:
        folder = Path(name)
        programs = {**files_of(readme), "scene.py": _SCENE}
        for file, text in programs.items():
            (folder / file).write_text(text, encoding="utf-8")
        terminal = Terminal(folder, columns=_COLUMNS, coloured=True, start=start)
        terminal.type("export MAESTRO_STATE_DIR=state")
        for line in ("python page.py", "python page.py", "python scene.py"):
            terminal.type(line)
        return {name: terminal.type(command) for name, command in COMMANDS.items()}


def demonstrated(folder: Path, start: Start = start_process) -> str:
    """Return what the demonstration prints, with colours."""
    terminal = Terminal(folder, columns=_COLUMNS, coloured=True, start=start, longest=_DEMO_SECONDS)
    return terminal.type(DEMO)


def draw(name: str, printed: str) -> str:
    """Return an SVG of a terminal: it needs no font of its own, and nothing from elsewhere."""
    screen = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    screen.print(Text.from_ansi(f"$ {COMMANDS.get(name, DEMO)}\n{printed}"))
    drawn = screen.export_svg(title="", unique_id=f"maestro-{name}")
    return re.sub(r"@font-face \{[^}]*\}\s*|<!--.*?-->\s*", "", drawn)


def shows(picture: str, printed: str, *, in_order: bool = True) -> bool:
    """Return whether a picture is of what was printed; times and blanks may differ."""
    lines = re.findall(r"<text class=\"[\w-]+-r\d+\"[^>]*>(.*?)</text>", picture, re.DOTALL)
    _, _, text = html.unescape("".join(lines)).replace("\xa0", " ").partition("\n")
    drawn, seen = _lines(text), _lines(Text.from_ansi(printed).plain)
    if in_order:
        return "".join(drawn) == "".join(seen)  # long lines are folded, where they are drawn
    return sorted(drawn) == sorted(seen)


def _lines(text: str) -> list[str]:
    """Return the lines of a text that say something, without blanks."""
    lines = ("".join(line.split()) for line in steady(text).splitlines())
    return [line for line in lines if line]
