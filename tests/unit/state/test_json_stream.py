"""Long JSON texts in parts: the same values as in one piece, and the same errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from maestro_hive.kernel.errors import DecodeError
from maestro_hive.maestro.state import json_stream
from maestro_hive.maestro.state.json_stream import (
    BytesSource,
    JsonStream,
    StreamedItems,
    StreamedMembers,
)
from tests.tables import for_each

VALUES: dict[str, Any] = {
    "texts": ["", "é 🐝 \u2028", 'a "quoted" \\ text\n', "x" * 100],
    "numbers": [0, -1, 12345678, 1.5, -2.5e-8, 10**30],
    "words": [True, False, None],
    "nested": {"a": [{"b": [[]]}, {}], "": {"c": "d"}},
}


@pytest.fixture(params=[1, 2, 3, 7, 64])
def _small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_READ_BYTES", request.param)


def stream_of(text: str | bytes) -> tuple[BytesSource, JsonStream]:
    data = text.encode() if isinstance(text, str) else text
    source = BytesSource(data, "a text")
    return source, JsonStream(source, 0, len(data))


def read(stream: JsonStream) -> dict[str, Any]:
    found = {name: stream.value() for name in stream.members()}
    stream.finish()
    return found


@pytest.mark.usefixtures("_small_parts")
@for_each("indent", [None, 1])
def test_values_are_the_same_wherever_the_text_is_cut(indent: int | None) -> None:
    _, stream = stream_of(json.dumps(VALUES, indent=indent, ensure_ascii=False))
    assert read(stream) == VALUES


@pytest.mark.usefixtures("_small_parts")
def test_items_and_members_are_read_when_they_are_asked_for() -> None:
    text = json.dumps({"é": list(VALUES.values()), "by name": VALUES}, ensure_ascii=False)
    source, stream = stream_of(text)
    names = stream.members()
    next(names)
    items = StreamedItems(source, stream, source.size)
    next(names)
    members = StreamedMembers(source, stream)
    assert list(names) == []
    assert len(items) == len(members) == len(VALUES)
    assert list(items) == list(items) == list(VALUES.values())
    assert dict(members) == VALUES
    assert "texts" in members
    assert "text" not in members


@pytest.mark.usefixtures("_small_parts")
@for_each(
    "text",
    [
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"b":2}}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xff"}',
        b'{"a":"\xe2\x82',
        b'{"a":1',
        b'{"a":1}}',
        b'{"a" 1}',
        b'{"a":1,}',
        b'{,"a":1}',
        b'{1:"a"}',
        b'{"a":01}',
        b'{"a":tru}',
        b'{"a":"x}',
        b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"a":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_strict_json_is_an_error_of_ours(text: bytes) -> None:
    _, stream = stream_of(text)
    with pytest.raises(DecodeError):
        read(stream)


def test_an_error_early_in_a_long_text_does_not_need_all_of_it() -> None:
    class Counted(BytesSource):
        most = 0

        def read_at(self, start: int, length: int) -> bytes:
            self.most = max(self.most, start + length)
            return super().read_at(start, length)

    data = b'{"a":[1,]' + b" " * 5_000_000 + b"}"
    source = Counted(data, "a text")
    stream = JsonStream(source, 0, len(data))
    with pytest.raises(DecodeError):
        read(stream)
    assert source.most < 3_000_000
