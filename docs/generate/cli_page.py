"""``docs/reference/cli.md``: every verb of ``maestro``, with the help that it prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.cli.app import SECTIONS, cli

if TYPE_CHECKING:
    from collections.abc import Iterator

_WIDTH = 80

_HEAD = """\
# The command `maestro`

What each verb's `--help` prints. This page is made from the code by `make docs`, and a test
compares the two.

Every verb prints on stderr which folder it uses, and why that one. In a terminal it prints tables
with relative times; in a pipe one line per item, columns separated by tabs, times as ISO 8601; with
`--json` one JSON object, except `events` and `logs`, which print one per line. `NO_COLOR` is honoured.
Errors are one sentence on stderr; `--debug` adds the traceback.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure |
| 2 | wrong use |
| 75 | a person is needed |
| 129, 130, 143 | stopped by a signal, 128 and its number: the terminal was closed, Ctrl+C, SIGTERM |
"""


def write() -> str:
    """Return the page."""
    names = cli.context_settings["help_option_names"]  # stored by a command when first asked
    root = click.Context(cli, info_name="maestro", terminal_width=_WIDTH, help_option_names=names)
    parts = [_HEAD, f"\n## `maestro`\n\n{_help(root)}"]
    for section, verbs in SECTIONS.items():
        parts.append(f"\n## {section}\n")
        for verb in verbs:
            command = cli.get_command(root, verb.name)
            assert command is not None
            parts += _entries(command, verb.name, root)
    return "".join(parts)


def _entries(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, parent, info_name=name, terminal_width=_WIDTH)
    yield f"\n### `{context.command_path}`\n\n{_help(context)}"
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            below = command.get_command(context, verb)
            assert below is not None
            yield from _entries(below, verb, context)


def _help(context: click.Context) -> str:
    """Return what ``--help`` prints, as wide on every terminal."""
    return f"```text\n{context.get_help().rstrip()}\n```\n"
