"""Large values are stored once, and what grew as what was added."""

from __future__ import annotations

import json
import random
from time import thread_time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_hive.journal.payloads import Payloads, Placed, Reference, Row, reference_of
from maestro_hive.journal.values import LARGE_BYTES, decode, encode
from maestro_hive.kernel.errors import DecodeError, ValueCorruptError
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator


class Run:
    """The large values of a run and the rows that are written, as a table has them."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.payloads = Payloads()
        self.entries: list[bytes] = []

    def write(self, *values: Any) -> None:
        """Write values, each with an entry of its own."""
        for value in values:
            self.commit(self.payloads.place(encode(value).data))

    def commit(self, placed: Placed) -> None:
        for row in placed.rows:
            assert self.rows.setdefault(row.number, row) == row
        self.entries.append(placed.text)
        self.payloads.written(placed.rows)

    def restart(self) -> None:
        self.payloads = Payloads(max(self.rows, default=0))

    def chain(self, number: int) -> Iterator[Row]:
        """Yield the rows of a value, from its own to a whole one."""
        at: int | None = number
        while at is not None and at in self.rows:
            yield self.rows[at]
            at = self.rows[at].base

    def read(self, at: int) -> bytes:
        reference = reference_of(self.entries[at])
        return self.entries[at] if reference is None else self.payloads.read(reference, self.chain)

    def stored_bytes(self) -> int:
        return sum(len(row.data) for row in self.rows.values())

    def wholes(self) -> list[int]:
        return [row.number for row in self.rows.values() if row.base is None]


def message(number: int) -> dict[str, Any]:
    text = "".join(random.Random(number).choices('abcdefgh "ü🐝\n', k=1000))
    return {"role": "user", "number": number, "text": text}


MESSAGES = [message(number) for number in range(300)]


def test_a_small_value_stays_in_its_entry() -> None:
    run = Run()
    run.write("x" * (LARGE_BYTES - 3))
    assert run.rows == {}
    assert decode(run.entries[0]) == "x" * (LARGE_BYTES - 3)
    run.write("x" * (LARGE_BYTES - 2))
    assert len(run.rows) == 1
    assert len(run.entries[1]) < 120
    assert decode(run.read(1)) == "x" * (LARGE_BYTES - 2)


def test_a_reference_is_read_as_it_was_written() -> None:
    reference = Reference(3, 102_400, bytes(range(32)))
    written = reference.text()
    assert reference_of(written) == reference
    assert json.loads(written) == {"$": "payload", "v": [3, 102_400, bytes(range(32)).hex()]}


def test_no_value_of_the_users_looks_like_a_reference() -> None:
    lookalike = json.loads(Reference(1, 20_000, bytes(32)).text())
    data = encode(lookalike).data
    assert reference_of(data) is None
    assert decode(data) == lookalike
    with pytest.raises(DecodeError, match="payload"):
        decode(Reference(1, 20_000, bytes(32)).text())


def test_a_value_that_is_in_memory_is_not_stored_again() -> None:
    run = Run()
    run.write(MESSAGES[:20], MESSAGES[:20], MESSAGES[50:80], MESSAGES[:20])
    assert len(run.rows) == 2
    assert run.entries[0] == run.entries[1] == run.entries[3]


def test_a_growing_value_is_stored_at_most_three_times() -> None:
    run = Run()
    for count in range(1, 301):
        run.write(MESSAGES[:count])
    assert run.stored_bytes() <= 3 * len(encode(MESSAGES).data)
    # With whole copies now and then, so that no chain becomes endless.
    assert 2 <= len(run.wholes()) <= 40


def test_a_growing_value_with_a_counter_on_both_sides_is_stored_at_most_three_times() -> None:
    run = Run()
    for count in range(1, 301):
        run.write({"a": count, "messages": MESSAGES[:count], "z": [count, count]})
    assert run.stored_bytes() <= 3 * len(encode(MESSAGES).data)


@pytest.mark.parametrize("change", ["an item in the middle", "the last item"])
def test_a_growing_value_of_equal_texts_that_is_edited_is_stored_at_most_three_times(
    change: str,
) -> None:
    run = Run()
    messages: list[dict[str, Any]] = []
    for number in range(200):
        text = "as before, and again. " * 50
        messages.append({"number": number, "role": "user", "text": text})
        at = len(messages) // 2 if change == "an item in the middle" else max(0, number - 1)
        messages[at] = {**messages[at], "edited": number}
        run.write(messages)
    assert run.stored_bytes() <= 3 * len(encode(messages).data)


def test_values_that_grow_side_by_side_are_stored_at_most_three_times() -> None:
    run = Run()
    agents = [[message(1000 * number + each) for each in range(60)] for number in range(6)]
    for count in range(20, 61):
        for messages in agents:
            run.write(messages[:count])
    assert run.stored_bytes() <= 3 * sum(len(encode(each).data) for each in agents)


def test_any_value_of_a_chain_can_be_read() -> None:
    run = Run()
    values = [MESSAGES[:count] for count in range(1, 120)]
    run.write(*values)
    for at in (0, 1, 59, 60, 117, 118):
        run.restart()
        assert run.read(at) == encode(values[at]).data


def test_a_value_with_small_changes_without_end_needs_few_rows() -> None:
    run = Run()
    rows = MESSAGES[:30]
    for number in range(1000):
        run.write([*rows, number])
    assert len(list(run.chain(1000))) <= 800
    assert run.stored_bytes() <= 10 * len(encode(rows).data)
    run.restart()
    assert decode(run.read(999)) == [*rows, 999]


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 40), st.booleans()),
        max_size=25,
    )
)
def test_whatever_is_written_can_be_read_before_and_after_a_restart(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    run, written = Run(), []
    for start, changed, count, restarts in steps:
        if restarts:
            run.restart()
        rows = [*MESSAGES[start * 40 : start * 40 + count]]
        rows[changed % count] = {"changed": changed}
        written.append(encode(rows).data)
        run.write(rows)
    for _ in range(2):
        assert [run.read(at) for at in range(len(written))] == written
        run.restart()
    assert [run.read(at) for at in reversed(range(len(written)))] == written[::-1]


def test_after_a_restart_values_grow_from_the_one_that_was_read() -> None:
    run = Run()
    values = [MESSAGES[:count] for count in range(20, 60)]
    for at, value in enumerate(values):
        run.write(value)
        run.restart()
        run.read(at)
    assert run.stored_bytes() <= 3 * len(encode(values[-1]).data)
    assert [run.read(at) for at in range(40)] == [encode(value).data for value in values]


def test_values_that_have_nothing_in_common_are_stored_whole() -> None:
    run = Run()
    run.write(*(MESSAGES[at : at + 20] for at in range(0, 200, 20)))
    assert run.wholes() == list(range(1, 11))


def test_texts_over_the_limit_of_memory_are_stored_whole_and_not_remembered() -> None:
    run = Run()
    large = "x" * (33 << 20)
    run.write(MESSAGES[:20], large, large, MESSAGES[:21])
    assert run.wholes() == [1, 2, 3]
    assert run.rows[4].base == 1
    assert decode(run.read(2)) == large


# --- rows and their entries -----------------------------------------------------------------------


def test_a_refused_entry_leaves_no_gap_below_the_next_one() -> None:
    run = Run()
    run.write(MESSAGES[:50])
    run.payloads.place(encode(MESSAGES[:51]).data)  # its entry is refused
    run.write(MESSAGES[:52])
    assert sorted(run.rows) == [1, 2, 3]
    run.restart()
    assert decode(run.read(1)) == MESSAGES[:52]


def test_the_same_value_in_entries_of_one_batch_comes_with_each_of_them() -> None:
    run = Run()
    first, second = (run.payloads.place(encode(MESSAGES[:50]).data) for _ in range(2))
    assert first == second
    assert len(first.rows) == 1
    run.commit(second)
    assert run.payloads.place(encode(MESSAGES[:50]).data) == Placed(first.text, ())
    run.commit(first)  # its row is written already, and the same
    assert len(run.rows) == 1


def test_an_entry_brings_the_rows_that_its_value_builds_on() -> None:
    run = Run()
    placed = [run.payloads.place(encode(MESSAGES[:count]).data) for count in (50, 51, 52)]
    assert [[row.number for row in each.rows] for each in placed] == [[1], [1, 2], [1, 2, 3]]
    run.commit(placed[2])
    run.restart()
    assert decode(run.read(0)) == MESSAGES[:52]


# --- damage ---------------------------------------------------------------------------------------

THIRD = encode(MESSAGES[:52]).data


def copies(*parts: list[int] | bytes) -> bytes:
    return msgspec.msgpack.encode(parts)


DAMAGES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "its base is gone": (1, None),
    "it is gone": (3, None),
    "it builds on itself": (3, {"base": 3}),
    "it builds on a later one": (2, {"base": 3}),
    "it builds on none": (2, {"base": 0}),
    "it builds on another one": (3, {"base": 1}),
    "it is taken for a whole one": (2, {"base": None}),
    "it has another number": (2, {"number": 7}),
    "it is no msgpack": (2, {"data": b"[[0,"}),
    "it is no difference": (2, {"data": msgspec.msgpack.encode({"a": 1})}),
    "it is nested endlessly": (2, {"data": b"\x91" * 100_000}),
    "it reaches too far": (2, {"data": copies([0, 99_999_999])}),
    "it makes too much": (2, {"data": copies(*[[0, 50_000]] * 10_000)}),
    "it is empty": (3, {"data": copies()}),
    "the whole one was changed": (1, {"data": bytes(len(encode(MESSAGES[:50]).data))}),
    "the whole one was cut": (1, {"data": encode(MESSAGES[:50]).data[:-1]}),
}


@for_each("number, change", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_value_is_found_and_never_given_out(
    number: int, change: dict[str, Any] | None
) -> None:
    run = Run()
    run.write(MESSAGES[:50], MESSAGES[:51], MESSAGES[:52])
    assert run.rows[3].base == 2
    if change is None:
        del run.rows[number]
    else:
        run.rows[number] = run.rows[number]._replace(**change)
    run.restart()
    with pytest.raises(ValueCorruptError) as caught:
        run.read(2)
    assert caught.value.number == 3
    assert "value 3 of the run cannot be trusted: " in str(caught.value)


def test_every_flipped_byte_of_a_difference_is_found() -> None:
    run = Run()
    run.write(MESSAGES[:50], MESSAGES[:51])
    data = run.rows[2].data
    for at in range(len(data)):
        run.rows[2] = run.rows[2]._replace(data=data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        run.restart()
        with pytest.raises(ValueCorruptError):
            run.read(1)


def test_a_reference_to_another_value_is_found() -> None:
    run = Run()
    run.write(MESSAGES[:50], MESSAGES[50:100])
    first, second = (reference_of(each) for each in run.entries)
    assert first is not None
    assert second is not None
    for restarts in (False, True):
        if restarts:
            run.restart()
        with pytest.raises(ValueCorruptError, match="digest"):
            run.payloads.read(first._replace(number=2), run.chain)


# --- time -----------------------------------------------------------------------------------------


def test_the_cost_of_a_step_does_not_grow_with_the_square_of_a_list() -> None:
    run = Run()
    seconds: list[float] = []
    for count in range(1, 301):
        started = thread_time()
        run.payloads.place(encode(MESSAGES[:count]).data)
        run.write(MESSAGES[:count])
        seconds.append(thread_time() - started)
    assert min(seconds[-20:]) < 0.02
