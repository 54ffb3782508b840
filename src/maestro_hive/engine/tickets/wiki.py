"""Jira Server's wiki markup: texts that are displayed as they were written."""

from __future__ import annotations

import re

from maestro_hive.engine.tickets.texts import Block, blocks, fitting, length

#: The longest description or comment.
LIMIT = 32_767

#: Markup wherever it stands; a backslash before it displays the character itself.
_ANYWHERE = re.compile(r"[{}\[\]|*_+^~!]|\?(?=\?)|(?<=\?)\?")
#: Inside of a word a dash is one; elsewhere it strikes out, or joins with others to a longer one.
_DASH = re.compile(r"(?<![^\W_])-|-(?![^\W_])")
#: Emoticons: a backslash before the first character displays them as they are.
_EMOTICON = re.compile(r"(?:[:;](?=[()PDO|]))|\((?=(?:[/xiyn!?*+-]|on|off|flag|flagoff)\))")
_ENTITY = re.compile(r"&(?=#?\w+;)")
#: Headings, quotations and lists at the start of a line.
_AT_START = re.compile(r"^(\s*)(h[1-6]|bq)\.")
_NUMBERED = re.compile(r"^(\s*)#")


def markup(text: str) -> str:
    """Return the markup that displays a text; of at most 32,767 characters."""
    return fitted(text, LIMIT)


def fitted(text: str, limit: int) -> str:
    """Return the markup that displays a text, shortened so that it has at most ``limit`` characters."""
    return _markup(fitting(text, limit, lambda part: length(_markup(part))))


def _markup(text: str) -> str:
    return "\n\n".join(_block(each) for each in blocks(text))


def _block(block: Block) -> str:
    match block.kind:
        case "paragraph":
            return "\n".join(escaped(line) for line in block.lines)
        case "list":
            return "\n".join(f"* {escaped(line)}" for line in block.lines)
        case "code":
            if any("{noformat" in line.lower() for line in block.lines):  # it would end the block
                return "\n".join(escaped(line) for line in block.lines)
            return "\n".join(("{noformat}", *block.lines, "{noformat}"))


def escaped(line: str) -> str:
    r"""Return a line in which nothing is markup; a backslash is an entity, since ``\\`` is a break."""
    line = _ENTITY.sub("&amp;", line).replace("\\", "&#92;")
    line = _EMOTICON.sub(lambda found: "\\" + found.group(), line)
    line = _ANYWHERE.sub(lambda found: "\\" + found.group(), line)
    line = _DASH.sub(r"\\-", line)
    line = _AT_START.sub(r"\1\2&#46;", line)
    return _NUMBERED.sub(r"\1\\#", line)
