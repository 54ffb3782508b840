"""Whether the shell can read a command: it reads it with ``-n``, and executes nothing of it.

A shell that starts takes about a millisecond, so it is asked about each command once, and not about
those that are plain words, quoted texts and ``&&``: that is most of them.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

from maestro_hive.team.processes import SHELL

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The shell is asked about so many commands of a graph; the others show at their first attempt.
_MOST = 1_000
#: How many seconds it has for one, which may be megabytes long.
_SECONDS = 5.0
#: More of what it says is not shown: it may quote the command.
_SHOWN = 200

#: Words of which the shell expects others to follow or to stand before.
_RESERVED = re.compile(
    r"\b(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|select|function)\b|\[\["
)
_WORD = r"""(?:[\w./=:,@%+^~?*\[\]-]|'[^']*'|"[^"\\$`]*"|\$[A-Za-z_]\w*)++"""
_WORDS = rf"{_WORD}(?:[ \t]++{_WORD})*+[ \t]*+"
_PLAIN = re.compile(rf"[ \t]*+{_WORDS}(?:(?:&&|\|\|?|;)[ \t]*+{_WORDS})*+")
#: Where a shell says that something is wrong: ``/bin/sh: 1: Syntax error:``.
_PLACE = re.compile(r"[^:\n]*: *(?:line )?\d+: *(?:syntax error: *)?", re.IGNORECASE)


def unreadable(commands: Iterable[str]) -> dict[str, str]:
    """Return the commands that the shell cannot read, each with what it says."""
    found: dict[str, str] = {}
    asked = [each for each in dict.fromkeys(commands) if not _is_plain(each)]
    for each in asked[:_MOST]:
        try:
            wrong = _wrong(each)
        except subprocess.TimeoutExpired:
            break  # what is read so slowly is no usual graph: its other commands are not asked about
        if wrong is not None:
            found[each] = wrong
    return found


def _is_plain(command: str) -> bool:
    """Return whether a command has nothing in it that could be left open."""
    return _RESERVED.search(command) is None and _PLAIN.fullmatch(command) is not None


def _wrong(command: str) -> str | None:
    done = subprocess.run(  # noqa: S603 - with -n it executes nothing
        [SHELL, "-n"],
        input=command.encode(errors="replace"),
        capture_output=True,
        timeout=_SECONDS,
        env={"LC_ALL": "C"},
        check=False,
    )
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").partition("\n")[0]
    return _PLACE.sub("", said, count=1)[:_SHOWN] or f"{SHELL} -n ends with {done.returncode}"
