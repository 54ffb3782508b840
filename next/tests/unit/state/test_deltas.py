"""What was added: differences give back the text, and stay small where little is new."""

from __future__ import annotations

import contextlib
import json
import random
from itertools import pairwise
from time import thread_time
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maestro_hive.journal.differences import apply, difference
from maestro_hive.journal.values import MAX_BYTES, encode
from tests.tables import for_each

QUICK = settings(max_examples=100)

CHARACTERS = st.characters(exclude_categories=["Cs"])
#: Texts that have much in common: the same few blocks, in any order, with a little between them.
BLOCKS = st.sampled_from(
    ["abc" * 40, "ü" * 60, "🐝x" * 30, "\x00" * 50, json.dumps({"a": list(range(60))}), "é" * 23]
)
ALIKE = st.lists(BLOCKS | st.text(CHARACTERS, max_size=5), max_size=12).map("".join)
TEXTS = st.text(CHARACTERS, max_size=200) | ALIKE


@QUICK
@given(TEXTS, TEXTS)
@example("", "")
@example("", "new")
@example("old", "")
@example("a" * 500, "a" * 499)
@example("a" * 499, "a" * 500)
@example("é" * 100, "è" * 100)  # the same first byte in every character
@example("ü" * 100 + "a", "ý" + "ü" * 100 + "a")
@example("x" * 100 + "é", "y" * 100 + "ĩ")  # the same last byte
def test_a_difference_gives_back_the_text(old: str, new: str) -> None:
    before, after = old.encode(), new.encode()
    assert apply(before, [difference(before, after)], MAX_BYTES) == after


@QUICK
@given(st.lists(TEXTS, min_size=2, max_size=8))
def test_a_chain_of_differences_gives_back_every_text(texts: list[str]) -> None:
    data = [text.encode() for text in texts]
    links = [difference(old, new) for old, new in pairwise(data)]
    for at in range(len(data)):
        assert apply(data[0], links[:at], MAX_BYTES) == data[at]


EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 900), st.binary(max_size=300)), max_size=6
)


@settings(max_examples=200)
@given(st.integers(0, 9), EDITS)
def test_a_text_that_was_edited_comes_back(
    seed: int, edits: list[tuple[float, int, bytes]]
) -> None:
    old = encode([message(seed), *map(message, range(12)), [message(seed)] * 3]).data
    new = old
    for where, cut, put in edits:
        at = int(where * len(new))
        new = new[:at] + put + new[at + cut :]
    made = difference(old, new)
    assert apply(old, [made], MAX_BYTES) == new
    assert len(made) < len(new) + 200


def message(number: int) -> dict[str, Any]:
    text = "".join(random.Random(number).choices("abcdefgh ü🐝", k=400))
    return {"role": "user", "number": number, "text": text}


@for_each(
    "shape",
    [
        lambda count, messages: messages,
        lambda count, messages: {"a": count, "messages": messages},
        lambda count, messages: {"messages": messages, "z": count},
        lambda count, messages: {"a": count, "messages": messages, "z": str(count) * 3},
        lambda count, messages: [[{"deep": {"messages": messages}}, count]],
    ],
)
def test_a_growing_list_costs_what_was_added(shape: Any) -> None:
    messages = [message(number) for number in range(200)]
    for count in (9, 99, 150, 199):  # also where the counter becomes a digit longer
        old = encode(shape(count, messages[:count])).data
        new = encode(shape(count + 1, messages[: count + 1])).data
        made = difference(old, new)
        assert len(made) < len(encode(messages[count]).data) + 250
        assert apply(old, [made], MAX_BYTES) == new


def test_a_change_in_the_middle_costs_about_the_change() -> None:
    messages = [message(number) for number in range(100)]
    old = encode(messages).data
    messages[50]["text"] = "changed"
    new = encode(messages).data
    assert len(difference(old, new)) < 1200


@for_each("numbered", [True, False], ids=str)
@for_each("count", [1, 3, 6], ids=str)
def test_changes_apart_from_each_other_cost_about_the_changes(count: int, numbered: bool) -> None:
    """Texts repeat themselves: equal bytes are searched near their place first."""
    messages: list[dict[str, Any]] = [
        {"number": number if numbered else 0, "text": "the same text in every message. " * 12}
        for number in range(600)
    ]
    old = encode(messages).data
    for at in random.Random(1).sample(range(600), count):
        messages[at]["text"] = f"changed {at}"
    new = encode(messages).data
    made = difference(old, new)
    assert apply(old, [made], MAX_BYTES) == new
    assert len(made) < 1000 + 1500 * count


def test_texts_that_have_little_in_common_are_given_up_on() -> None:
    """Blocks far apart and in another order would be searched for a very long time."""
    blocks = [bytes([97 + number % 26]) * 60 + b"%08d" % number for number in range(60_000)]
    other = [block[:-8] + b"%08d" % (number + 7) for number, block in enumerate(blocks)]
    texts = b"".join(blocks), b"".join(other[::-1])
    started = thread_time()
    made = difference(*texts)
    assert thread_time() - started < 5
    assert apply(texts[0], [made], MAX_BYTES) == texts[1]


@pytest.mark.parametrize("at", [0, 1000, 2000], ids=["in front", "in the middle", "at the end"])
def test_a_megabyte_that_grew_is_compared_in_no_time(at: int) -> None:
    """The target is 3 ms; it takes a tenth of that on a quiet machine."""
    messages = [message(number) for number in range(2000)]
    old = encode(messages).data
    messages.insert(at, message(5000))
    new = encode(messages).data
    assert len(new) > 1_000_000
    best = 1.0
    for _ in range(20):
        started = thread_time()
        made = difference(old, new)
        best = min(best, thread_time() - started)
        assert len(made) < 1000
    assert best < 0.01


def test_the_same_text_is_one_copy() -> None:
    text = encode([message(number) for number in range(10)]).data
    assert msgspec.msgpack.decode(difference(text, text)) == [[0, len(text)]]


def test_a_long_chain_costs_its_links_and_not_the_text_of_each() -> None:
    text = random.Random(1).randbytes(4_000_000)
    links, after = [], text
    for number in range(500):
        at = 7_000 * number + 1_000
        changed = after[:at] + b"%d" % number + after[at + 100 :]
        links.append(
            msgspec.msgpack.encode([[0, at], b"%d" % number, [at + 100, len(after) - at - 100]])
        )
        after = changed
    started = thread_time()
    assert apply(text, links, MAX_BYTES) == after
    assert thread_time() - started < 1  # 500 copies of 4 MB take longer


def written(*parts: Any) -> bytes:
    return msgspec.msgpack.encode(list(parts))


@for_each(
    "link",
    [
        b"",
        b"\xc1",
        b"[[0, 1]]",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({}),
        written(None),
        written(1),
        written("text"),
        written([]),
        written([1]),
        written([1, 2, 3]),
        written(["1", 2]),
        written([0.5, 5]),
        written([None, None]),
        written([0, 0]),
        written([-1, 5]),
        written([0, -5]),
        written([0, 6]),
        written([5, 1]),
        written([100, 5]),
        written([0, 2**62]),
        written(b"abc") + b"x",
    ],
    ids=ascii,
)
def test_what_is_no_difference_is_refused(link: bytes) -> None:
    for chain in ([link], [written([0, 5]), link]):
        with pytest.raises(ValueError, match=r"."):
            apply(b"abcde", chain, MAX_BYTES)


def test_a_difference_that_makes_too_much_is_refused() -> None:
    double = written([0, 10], [0, 10])
    assert apply(b"0123456789", [double], 20) == b"0123456789" * 2
    with pytest.raises(ValueError, match="too long"):
        apply(b"0123456789", [double], 19)


@QUICK
@given(
    st.lists(
        st.lists(
            st.binary(max_size=20) | st.tuples(st.integers(0, 60), st.integers(1, 60)),
            max_size=5,
        ),
        max_size=4,
    ),
    st.binary(max_size=50),
)
def test_hostile_differences_bring_a_text_of_bounded_size_or_an_error(
    links: list[list[Any]], whole: bytes
) -> None:
    expected = whole
    for link in links:
        parts = [
            part if isinstance(part, bytes) else expected[part[0] : part[0] + part[1]]
            for part in link
        ]
        is_valid = all(len(part) == size_of(given) for part, given in zip(parts, link, strict=True))
        if not is_valid:
            break
        expected = b"".join(parts)
    else:
        if len(expected) <= 200 or not links:
            assert apply(whole, [written(*link) for link in links], 200) == expected
            return
    with contextlib.suppress(ValueError):
        assert len(apply(whole, [written(*link) for link in links], 200)) <= 200


def size_of(part: Any) -> int:
    return len(part) if isinstance(part, bytes) else part[1]
