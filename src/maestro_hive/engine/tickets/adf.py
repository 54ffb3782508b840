"""Jira Cloud's document format (ADF): texts to documents, and documents to texts."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, TypeAlias

from maestro_hive.engine.tickets.texts import Block, blocks, fitting, length

Node: TypeAlias = dict[str, Any]

#: The longest description or comment; the whole document is measured, to be safe.
LIMIT = 32_767
#: Documents of people are never nested as deep.
_MAX_DEPTH = 60


def document(text: str) -> Node:
    """Return a text as a document of at most 32,767 characters; no text node has a newline."""
    return _document(fitting(text, LIMIT, _size))


def _size(text: str) -> int:
    return length(json.dumps(_document(text), ensure_ascii=False, separators=(",", ":")))


def _document(text: str) -> Node:
    return {"version": 1, "type": "doc", "content": [_block(each) for each in blocks(text)]}


def _block(block: Block) -> Node:
    match block.kind:
        case "paragraph":
            return _paragraph(block.lines)
        case "list":
            items = [{"type": "listItem", "content": [_paragraph((i,))]} for i in block.lines]
            return {"type": "bulletList", "content": items}
        case "code" if len(block.lines) == 1 and block.lines[0]:
            return {"type": "codeBlock", "content": [{"type": "text", "text": block.lines[0]}]}
        case "code":  # a code block has no line breaks but newlines, which text nodes cannot have
            return _paragraph(block.lines, marks=[{"type": "code"}])


def _paragraph(lines: tuple[str, ...], **extra: Any) -> Node:
    content: list[Node] = []
    for number, line in enumerate(lines):
        if number:
            content.append({"type": "hardBreak"})
        if line:
            content.append({"type": "text", "text": line, **extra})
    return {"type": "paragraph", "content": content}


# --- documents to texts --------------------------------------------------------------------------


def text_of(node: object) -> str:
    """Return the text of a document; what is not text is left out, or named by its address."""
    return _blocks_text(_children(node), 0).strip("\n") if isinstance(node, dict) else ""


def _children(node: Node, depth: int = 0) -> list[Node]:
    content = node.get("content")
    if depth > _MAX_DEPTH or not isinstance(content, list):
        return []
    return [each for each in content if isinstance(each, dict)]


def _blocks_text(nodes: list[Node], depth: int) -> str:
    return "\n\n".join(text for text in (_block_text(node, depth) for node in nodes) if text)


def _block_text(node: Node, depth: int) -> str:
    children = _children(node, depth)
    match node.get("type"):
        case "paragraph" | "heading" | "caption" | "taskItem" | "decisionItem":
            text = _line(children, depth)
        case "codeBlock":
            text = f"```\n{_line(children, depth)}\n```"
        case "bulletList" | "taskList" | "decisionList":
            text = "\n".join(_item("- ", each, depth) for each in children)
        case "orderedList":
            first = _attribute(node, "order")
            start = first if isinstance(first, int) else 1
            text = "\n".join(_item(f"{n}. ", e, depth) for n, e in enumerate(children, start))
        case "table":
            text = "\n".join(_row(each, depth) for each in children)
        case "rule":
            text = "---"
        case "listItem":
            text = "\n".join(_block_text(each, depth + 1) for each in children)
        case _ if children:
            text = _blocks_text(children, depth + 1)
        case _:
            text = _inline_text(node, depth)
    return text


def _line(nodes: list[Node], depth: int) -> str:
    return "".join(_inline_text(each, depth) for each in nodes)


def _item(mark: str, node: Node, depth: int) -> str:
    lines = _block_text(node, depth + 1).split("\n")
    return mark + ("\n" + " " * len(mark)).join(lines)


def _row(node: Node, depth: int) -> str:
    cells = (_blocks_text(_children(each, depth), depth + 1) for each in _children(node))
    return " | ".join(" ".join(cell.split()) for cell in cells)


def _inline_text(node: Node, depth: int) -> str:
    match node.get("type"):
        case "text":
            text = _linked(node)
        case "hardBreak":
            text = "\n"
        case "mention" | "status" | "placeholder":
            text = _said(node, "text")
        case "emoji":
            text = _said(node, "text") or _said(node, "shortName")
        case "inlineCard" | "blockCard" | "embedCard":
            text = _said(node, "url")
        case "date":
            text = _day(_said(node, "timestamp"))
        case _:
            text = _line(_children(node, depth), depth + 1)
    return text


def _linked(node: Node) -> str:
    text = node.get("text")
    shown = text if isinstance(text, str) else ""
    marks = node.get("marks")
    for mark in marks if isinstance(marks, list) else ():
        if isinstance(mark, dict) and mark.get("type") == "link":
            address = _said(mark, "href")
            return shown if address in {"", shown} else f"{shown} ({address})"
    return shown


def _attribute(node: Node, name: str) -> object:
    attributes = node.get("attrs")
    return attributes.get(name) if isinstance(attributes, dict) else None


def _said(node: Node, name: str) -> str:
    value = _attribute(node, name)
    return str(value) if isinstance(value, str | int) else ""


def _day(milliseconds: str) -> str:
    try:
        return datetime.fromtimestamp(int(milliseconds) / 1000, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return milliseconds
