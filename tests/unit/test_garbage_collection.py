"""The garbage collector is off while many objects are made, and on again for everybody else."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.process import without_garbage_collection
from maestro_hive.maestro.state import codec_large
from maestro_hive.maestro.state.tree_codec import TreeEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _on_before_and_after() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_in_the_block_and_on_after_an_error() -> None:
    with without_garbage_collection():
        assert not gc.isenabled()
    with pytest.raises(ZeroDivisionError), without_garbage_collection():
        1 / 0  # noqa: B018 - the error is what is wanted
    assert gc.isenabled()


def test_it_stays_off_where_the_program_turned_it_off() -> None:
    gc.disable()
    with without_garbage_collection():
        pass
    assert not gc.isenabled()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_child_that_is_forked_meanwhile_has_it_on() -> None:
    with without_garbage_collection():
        child = os.fork()
        if child == 0:
            os._exit(42 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert gc.isenabled()


def test_it_is_off_while_a_large_value_is_encoded_and_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []

    def sleep(_seconds: float) -> None:
        seen.append(gc.isenabled())

    monkeypatch.setattr(codec_large.time, "sleep", sleep)  # type: ignore[attr-defined]
    value = [{"id": number, "name": "row"} for number in range(20_000)]
    data = codec_large.encode_large(value).data
    assert codec_large.decode_large(data) == value
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_the_tree_of_a_value_with_tags_is_made_for_a_few_items_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    convert = TreeEncoder.convert

    def counted(self: TreeEncoder, value: Any, room: int = 100) -> Any:
        if type(value) is list:
            made.append(len(value))
        return convert(self, value, room)

    monkeypatch.setattr(TreeEncoder, "convert", counted)
    value = [{"id": number, "key": b"bytes"} for number in range(5000)]
    assert codec_large.decode_large(codec_large.encode_large(value).data) == value
    assert sum(made) == 5000
    assert max(made) <= 1024
