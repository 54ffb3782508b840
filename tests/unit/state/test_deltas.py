"""What was added: differences give back the text, and stay small where little is new."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maestro_hive.maestro.state import deltas
from maestro_hive.maestro.state.codec import MAX_BYTES, encode
from maestro_hive.maestro.state.deltas import Copy, Instruction, Pieces, difference
from tests.tables import for_each
from tests.timing import cpu_seconds

QUICK = settings(max_examples=100, deadline=None)


def rebuild(size: int, links: list[list[Instruction]], whole: bytes) -> bytes:
    """Follow a chain of differences, newest first, back to a whole text."""
    pieces = Pieces(size)
    for link in links:
        pieces.apply(link)
    return pieces.finish(whole)


def through_json(instructions: list[Instruction]) -> list[Instruction]:
    return deltas.from_json(json.loads(json.dumps(deltas.to_json(instructions))))


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
    instructions = difference(before, after)
    assert deltas.size(instructions) == len(after)
    assert rebuild(len(after), [instructions], before) == after
    assert through_json(instructions) == instructions
    for step in instructions:
        if isinstance(step, Copy):
            before[step.start : step.start + step.length].decode()  # no character is cut
        else:
            step.decode()


@QUICK
@given(st.lists(TEXTS, min_size=2, max_size=8))
def test_a_chain_of_differences_gives_back_every_text(texts: list[str]) -> None:
    data = [text.encode() for text in texts]
    links = [difference(old, new) for old, new in pairwise(data)]
    for at in range(1, len(data)):
        assert rebuild(len(data[at]), links[:at][::-1], data[0]) == data[at]


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
        instructions = difference(old, new)
        added = len(encode(messages[count]).data)
        assert deltas.literal_size(instructions) < added + 200
        assert len(json.dumps(deltas.to_json(instructions))) < 4 * added + 300
        assert rebuild(len(new), [instructions], old) == new


def test_a_change_in_the_middle_costs_about_the_change() -> None:
    messages = [message(number) for number in range(100)]
    old = encode(messages).data
    messages[50]["text"] = "changed"
    new = encode(messages).data
    assert deltas.literal_size(difference(old, new)) < 1200


def test_a_change_in_every_item_costs_about_the_changes() -> None:
    messages = [message(number) for number in range(500)]
    old = encode(messages).data
    new = encode([{**each, "number": each["number"] + 1} for each in messages]).data
    instructions = difference(old, new)
    assert deltas.literal_size(instructions) < 30 * len(messages)
    assert rebuild(len(new), [instructions], old) == new


def test_texts_that_have_little_in_common_are_given_up_on() -> None:
    """Blocks far apart and in another order would be searched for a very long time."""
    blocks = [bytes([97 + number % 26]) * 60 + b"%08d" % number for number in range(60_000)]
    other = [block[:-8] + b"%08d" % (number + 7) for number, block in enumerate(blocks)]
    texts = b"".join(blocks), b"".join(other[::-1])
    assert cpu_seconds(lambda: difference(*texts), 5, tries=2) < 5


@pytest.mark.parametrize("at", [0, 1000, 2000], ids=["in front", "in the middle", "at the end"])
def test_a_megabyte_that_grew_is_compared_in_no_time(at: int) -> None:
    """The target is 3 ms; it takes a tenth of that on a quiet machine."""
    messages = [message(number) for number in range(2000)]
    old = encode(messages).data
    messages.insert(at, message(5000))
    new = encode(messages).data
    assert len(new) > 1_000_000
    assert deltas.literal_size(difference(old, new)) < 1000
    assert cpu_seconds(lambda: difference(old, new), 0.01, tries=20) < 0.01


def test_the_same_text_is_one_copy() -> None:
    text = encode([message(number) for number in range(10)]).data
    assert difference(text, text) == [Copy(0, len(text))]


@for_each(
    "written",
    [
        None,
        1,
        "text",
        {},
        [None],
        [1],
        [True],
        [[]],
        [[1]],
        [[1, 2, 3]],
        [["1", 2]],
        [[0, 0]],
        [[-1, 5]],
        [[0, -5]],
        [[0.0, 5]],
        [[None, None]],
        [{"start": 0, "length": 1}],
        [[[0, 1], 1]],
        ["\ud800"],
    ],
    ids=ascii,
)
def test_what_is_no_difference_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        deltas.from_json(written)


@for_each(
    "size, links, whole",
    [
        (5, [[Copy(0, 5)]], b"abcd"),  # reaches beyond the text
        (5, [[Copy(100, 5)]], b"abcd"),
        (5, [[b"abcd"]], b""),  # too short
        (5, [[]], b"abcde"),
        (5, [[Copy(0, 5)], [b"abc"]], b""),  # too short further back
        (5, [[Copy(3, 5)], [b"abcd", Copy(0, 2)]], b"xx"),
        (5, [], b"abcd"),
        (-1, [], b""),
        (MAX_BYTES + 1, [], b""),
        (2**62, [], b""),
    ],
)
def test_a_difference_that_does_not_fit_is_refused(
    size: int, links: list[list[Instruction]], whole: bytes
) -> None:
    with pytest.raises(ValueError, match=r"."):
        rebuild(size, links, whole)


@QUICK
@given(
    st.integers(0, 50),
    st.lists(
        st.lists(
            st.binary(max_size=20) | st.builds(Copy, st.integers(0, 60), st.integers(1, 60)),
            max_size=5,
        ),
        max_size=4,
    ),
    st.binary(max_size=50),
)
def test_hostile_differences_bring_a_text_of_the_size_or_an_error(
    size: int, links: list[list[Instruction]], whole: bytes
) -> None:
    try:
        made = rebuild(size, links, whole)
    except ValueError:
        return
    assert len(made) == size
