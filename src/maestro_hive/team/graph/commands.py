"""Which programs the commands of a graph start, as far as their text says."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maestro_hive.team.graph.records import Graph

#: What the shell does itself.
_BUILT_IN = frozenset(
    "! . : [ [[ ]] alias bg break case cd command continue declare do done echo elif else esac eval"
    " exec exit export false fg fi for function getopts hash if in jobs let local printf pwd read"
    " readonly return select set shift source test then time times trap true type ulimit umask unset"
    " until wait while { }".split()
)
#: After these the next word is a command again.
_TRANSPARENT = frozenset("! command do else elif exec if then time until while {".split())
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", re.ASCII)
_MOST_CHARACTERS = 10_000
#: What stands for the prompt in a persona's command.
PROMPT = "{prompt}"
_SHELLS = frozenset("sh bash dash zsh ksh ash mksh".split())
#: Options of shells that have a value.
_WITH_VALUE = frozenset({"--rcfile", "--init-file"})
PROMPT_ADVICE = (
    'pass it as an argument of its own after the script, as in ["sh", "-c", "tool \\"$1\\"", "sh",'
    ' "{prompt}"], or read it from the standard input'
)


def programs(command: str) -> tuple[str, ...]:
    """Return the programs that a command for the shell looks up on PATH, as far as one can tell.

    What stands in substitutions, here-documents and after an unusual construct is not looked for.
    """
    text = command[:_MOST_CHARACTERS].partition("<<")[0]
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.commenters = ""
    found: dict[str, None] = {}
    first = True
    try:
        for word in lexer:
            if set(word) <= set(";&|()"):
                first = True
            elif first and _ASSIGNMENT.match(word):
                continue
            elif first:
                first = word in _TRANSPARENT
                if word not in _BUILT_IN and _NAME.fullmatch(word):
                    found[word] = None
    except ValueError:  # a quote that is not closed, or closed in a way that only a shell knows
        pass
    return tuple(found)


def is_prompt_in_script(words: Sequence[str]) -> bool:
    """Return whether a shell would read the prompt as a part of its script, as in ``sh -c {prompt}``."""
    for at, word in enumerate(words):
        if word.rpartition("/")[2] in _SHELLS:
            script = _script(words[at + 1 :])
            if script is not None:
                return PROMPT in script
    return False


def _script(arguments: Sequence[str]) -> str | None:
    """Return the script among the arguments of a shell; None if it reads that from a file."""
    is_given, rest = False, iter(arguments)
    for word in rest:
        if word == "--":
            return next(rest, None) if is_given else None
        if len(word) < 2 or word[0] not in "-+":
            return word if is_given else None
        if word.startswith("--"):
            values = word in _WITH_VALUE
        else:
            is_given = is_given or "c" in word
            values = word[-1] in "oO"  # as in -euo pipefail
        if values:
            next(rest, None)
    return None


def needed_programs(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the programs that verifications and gates need, each with who needs it.

    Those of personas must be there before anything starts; these may be made by a task.
    """
    needed: dict[str, dict[str, None]] = {}
    for who, program in _uses(graph):
        needed.setdefault(program, {})[who] = None
    return {program: tuple(users) for program, users in needed.items()}


def _uses(graph: Graph) -> Iterator[tuple[str, str]]:
    for task in graph.tasks:
        if task.verification is not None:
            for program in programs(task.verification.command):
                yield task.id, program
    for level in graph.levels:
        for gate in level.gates:
            for program in programs(gate.command):
                yield f"gate {gate.name!r} of level {level.number}", program
