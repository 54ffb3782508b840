"""A document proves itself: no byte of it can change unseen."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_hive.kernel.errors import DocumentCorruptError, MaestroError, NewerFormatError
from maestro_hive.maestro.state.run_document import DOCUMENT_FORMAT, seal, unseal
from tests.tables import for_each

BODY: dict[str, Any] = {"name": "grün 🐝", "list": [1, {"b": None, "a": 1.5}], "z": "", "a": True}


def resealed(document: bytes) -> bytes:
    """A document with other contents and a right digest, as somebody else may write it."""
    digest = hashlib.sha256(document).hexdigest().encode()
    return b'{"document":' + document + b',"sha256":"' + digest + b'"}\n'


def test_what_was_sealed_comes_back() -> None:
    assert unseal(seal("test", BODY), "test", "a.json") == BODY
    assert unseal(seal("test", {}), "test", "a.json") == {}


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])).filter(
            lambda name: name not in {"format", "kind"}
        ),
        st.integers() | st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.none()),
    )
)
def test_any_members_come_back(body: dict[str, Any]) -> None:
    text = seal("test", body)
    assert unseal(text, "test", "a.json") == body
    assert seal("test", dict(reversed(body.items()))) == text


def test_anybody_can_check_it_with_a_json_parser_and_a_hash_function() -> None:
    text = seal("test", BODY)
    parsed = json.loads(text)
    assert parsed["document"] == {**BODY, "format": DOCUMENT_FORMAT, "kind": "test"}
    inner = text[text.index(b":") + 1 : text.rindex(b',"sha256"')]
    assert hashlib.sha256(inner).hexdigest() == parsed["sha256"]
    assert text.endswith(b"\n")


def test_raw_members_stand_as_they_are() -> None:
    text = seal("test", {"b": 1}, {"a": b'{"x" : 1}'})
    assert b'"a":{"x" : 1},"b":1' in text
    assert unseal(text, "test", "a.json") == {"a": {"x": 1}, "b": 1}


def test_every_changed_byte_is_found() -> None:
    text = seal("test", BODY)
    for at in range(len(text)):
        for bit in (0x01, 0x20, 0x80):
            changed = bytearray(text)
            changed[at] ^= bit
            with pytest.raises(DocumentCorruptError) as caught:
                unseal(bytes(changed), "test", "a.json")
            assert caught.value.name == "a.json"
            assert "a.json" in str(caught.value)


def test_every_cut_is_found() -> None:
    text = seal("test", BODY)
    for at in range(len(text)):
        for torn in (text[:at], text[at + 1 :], text[:at] + text[at + 1 :]):
            with pytest.raises(DocumentCorruptError):
                unseal(torn, "test", "a.json")


@for_each("more", [b"\n", b" ", b"\0", b"{}"])
def test_more_bytes_are_found(more: bytes) -> None:
    text = seal("test", BODY)
    for changed in (text + more, more + text, text[:-1] + more + text[-1:]):
        with pytest.raises(DocumentCorruptError):
            unseal(changed, "test", "a.json")


def test_zeros_as_a_power_cut_leaves_them_are_found() -> None:
    text = seal("test", BODY)
    for kept in range(0, len(text), 7):
        with pytest.raises(DocumentCorruptError):
            unseal(text[:kept] + bytes(len(text) - kept), "test", "a.json")


def test_a_newer_format_is_refused_as_such() -> None:
    text = resealed(b'{"format":%d,"kind":"test","new":1}' % (DOCUMENT_FORMAT + 1))
    with pytest.raises(NewerFormatError) as caught:
        unseal(text, "test", "a.json")
    assert (caught.value.found, caught.value.known) == (DOCUMENT_FORMAT + 1, DOCUMENT_FORMAT)


@for_each("number", ["0", "-1", "true", "1.0", '"1"', "null", "[1]"])
def test_a_format_that_is_no_format_is_refused(number: str) -> None:
    text = resealed(f'{{"format":{number},"kind":"test"}}'.encode())
    with pytest.raises(DocumentCorruptError, match="format"):
        unseal(text, "test", "a.json")


@pytest.mark.parametrize("kind", ["another", "", "Test"])
def test_a_document_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(DocumentCorruptError, match="not a test document"):
        unseal(seal(kind, BODY), "test", "a.json")


@for_each(
    "document",
    [
        b"[]",
        b"1",
        b"null",
        b"",
        b"{}",
        b'{"kind":"test"}',
        b'{"format":1}',
        b'{"format":1,"kind":"test","a":NaN}',
        b'{"format":1,"kind":"test","a":1,"a":2}',
        b'{"format":1,"kind":"test"},"sha256":"x',
        b"[" * 100_000,
        b'{"format":1,"kind":"test","a":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"\xff",
    ],
    ids=ascii,
)
def test_a_right_digest_over_something_else_is_not_trusted(document: bytes) -> None:
    with pytest.raises(DocumentCorruptError):
        unseal(resealed(document), "test", "a.json")


def test_the_digest_can_be_left_unchecked_and_all_else_holds() -> None:
    text = seal("test", BODY).replace(b"true", b"null")
    with pytest.raises(DocumentCorruptError, match="altered"):
        unseal(text, "test", "a.json")
    assert unseal(text, "test", "a.json", verify=False) == {**BODY, "a": None}
    with pytest.raises(DocumentCorruptError):
        unseal(text[:-2], "test", "a.json", verify=False)
    with pytest.raises(DocumentCorruptError):
        unseal(text, "another", "a.json", verify=False)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_no_bytes_bring_anything_but_an_error_of_ours(data: bytes, verify: bool) -> None:
    for text in (data, resealed(data)):
        with pytest.raises(MaestroError):
            unseal(text, "test", "a.json", verify=verify)
