"""Jira's document format: what a text becomes, and what is read of what people write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_hive.engine.tickets import adf
from tests.jira_server import adf_problem
from tests.tables import for_each


def doc(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "type": "doc", "content": list(nodes)}


def node(kind: str, *content: Any, **attrs: Any) -> dict[str, Any]:
    children = [
        {"type": "text", "text": each} if isinstance(each, str) else each for each in content
    ]
    return {
        "type": kind,
        **({"content": children} if content else {}),
        **({"attrs": attrs} if attrs else {}),
    }


def test_paragraphs_lists_and_code_have_nodes_of_their_own() -> None:
    text = "one\ntwo\n\n- a\n- b\n```\nx\n```\nthree"
    assert adf.document(text) == doc(
        node("paragraph", "one", node("hardBreak"), "two"),
        node("bulletList", node("listItem", node("paragraph", "a")), node("listItem", node("paragraph", "b"))),
        node("codeBlock", "x"),
        node("paragraph", "three"),
    )  # fmt: skip


def test_lines_of_code_are_marked_as_code() -> None:
    (paragraph,) = adf.document("```\nx\n\n  y\n```")["content"]
    assert [each["type"] for each in paragraph["content"]] == [
        "text",
        "hardBreak",
        "hardBreak",
        "text",
    ]
    assert paragraph["content"][3]["marks"] == [{"type": "code"}]
    assert paragraph["content"][3]["text"] == "  y"


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab \n\r\x0b\x85\u2028\x00-`*_😀\ud800"), max_size=60))
def test_every_text_becomes_a_document_that_jira_accepts(text: str) -> None:
    made = adf.document("x" + text)
    assert adf_problem(made) is None
    json.dumps(made).encode()


@pytest.mark.parametrize("text", ["x" * 100_000, "x\n" * 60_000, "- 😀\n" * 30_000, '"' * 50_000])
def test_a_document_is_never_longer_than_jira_accepts(text: str) -> None:
    written = json.dumps(adf.document(text), ensure_ascii=False, separators=(",", ":"))
    assert 20_000 < len(written.encode("utf-16-le")) // 2 <= adf.LIMIT


@for_each(
    "text", ["one", "one\ntwo", "one\n\ntwo", "- a\n- b", "```\nx\n```", "a\n\n- b\n\nc", "  x"]
)
def test_a_text_comes_back(text: str) -> None:
    assert adf.text_of(adf.document(text)) == text


PEOPLE_WRITE: list[tuple[dict[str, Any], str]] = [
    (node("heading", "Title", level=2), "Title"),
    (node("paragraph", "a", node("hardBreak"), "b"), "a\nb"),
    (node("paragraph", node("mention", id="1", text="@Ada"), " look"), "@Ada look"),
    (node("paragraph", node("emoji", shortName=":ok:", text="👌")), "👌"),
    (node("paragraph", node("emoji", shortName=":ours:")), ":ours:"),
    (node("paragraph", node("inlineCard", url="https://x.example")), "https://x.example"),
    (node("blockCard", url="https://x.example"), "https://x.example"),
    (node("paragraph", node("date", timestamp="1735689600000")), "2025-01-01"),
    (node("paragraph", node("date", timestamp="later")), "later"),
    (node("paragraph", node("status", text="DONE", color="green")), "DONE"),
    (node("codeBlock", "x = 1\ny = 2", language="python"), "```\nx = 1\ny = 2\n```"),
    (
        node("orderedList", node("listItem", node("paragraph", "a")), order=3),
        "3. a",
    ),
    (
        node(
            "bulletList",
            node(
                "listItem",
                node("paragraph", "a"),
                node("bulletList", node("listItem", node("paragraph", "b"))),
            ),
        ),
        "- a\n  - b",
    ),
    (node("taskList", node("taskItem", "do it", state="TODO")), "- do it"),
    (node("blockquote", node("paragraph", "said")), "said"),
    (node("panel", node("paragraph", "note"), panelType="info"), "note"),
    (node("rule"), "---"),
    (
        node(
            "table",
            node("tableRow", node("tableHeader", node("paragraph", "h")), node("tableCell", node("paragraph", "c"))),
        ),
        "h | c",
    ),
    (node("mediaSingle", node("media", id="1", type="file")), ""),
    (node("expand", node("paragraph", "inside"), title="more"), "inside"),
    (node("somethingNew", node("paragraph", "text")), "text"),
]  # fmt: skip


@for_each("written, text", PEOPLE_WRITE)
def test_what_people_write_is_read_as_text(written: dict[str, Any], text: str) -> None:
    assert adf.text_of(doc(written)) == text
    assert adf.text_of(doc(node("paragraph", "before"), written)).startswith("before")


def test_a_link_is_read_with_its_address() -> None:
    link = {"type": "link", "attrs": {"href": "https://x.example"}}
    assert adf.text_of(
        doc(node("paragraph", {"type": "text", "text": "here", "marks": [link]}))
    ) == ("here (https://x.example)")


@for_each(
    "broken",
    [None, 7, [], {}, {"content": 7}, {"content": [7, None]}, doc({"type": "text", "text": 7}),
     doc({"type": "paragraph", "content": [{"type": "mention", "attrs": 7}]}),
     doc({"type": "paragraph", "content": [{"type": "text", "text": "", "marks": 7}]})],
)  # fmt: skip
def test_what_is_no_document_has_no_text(broken: Any) -> None:
    assert adf.text_of(broken) == ""


@for_each("kind", ["blockquote", "bulletList", "listItem", "paragraph", "table"])
def test_a_document_that_is_nested_too_deep_is_cut(kind: str) -> None:
    deep = node("paragraph", "x")
    for _ in range(3000):
        deep = node(kind, deep)
    assert isinstance(adf.text_of(doc(deep)), str)
