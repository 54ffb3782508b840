"""Errors keep their facts and their text, also in the process that did not raise them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel import errors
from maestro_hive.kernel.errors import MaestroError
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLES: list[MaestroError] = [
    errors.MaestroError("something"),
    errors.ConfigurationError("max_attempts is 0"),
    errors.RunMismatchError("run 'r' belongs to workflow 'build'"),
    errors.InvalidIdentifierError("run id", "../x", "cannot be used as a name"),
    errors.FolderError(Path("/a"), "is not a folder"),
    errors.StorageError("something about the disk"),
    errors.AtomicWriteError(Path("/a"), "No space left on device"),
    errors.AtomicWriteError(Path("/a"), "its folder could not be synced", replaced=True),
    errors.StoreClosedError("closed"),
    errors.CorruptionError("corrupt"),
    errors.DocumentCorruptError("doc", "it is torn", moved_to=Path("/a/doc.damaged-1")),
    errors.ValueCorruptError(3, "it is torn"),
    errors.CodecError("value", "no form"),
    errors.EncodeError("result.users[3].photo", "no form"),
    errors.DecodeError("value", "not JSON"),
    errors.UnknownClassError("value", "app:Part is not imported"),
    errors.RecordedError("app.Gone", "x", "its class is gone"),
    errors.StoreFailedError("the journal cannot be synced"),
    errors.StoreUnreachable("timeout", outcome_unknown=True),
    errors.FormatError("the journal", 4, 5),
    errors.RefusedError("refused"),
    errors.FencedError("r", 7),
    errors.StaleDocumentError("breaker", "step/ask"),
    errors.NoRoomError("limit/ask", used=0, held=3, most=3, wanted=1),
    errors.RunLeasedError("r", "process 7"),
    errors.RunInterruptedError("r", "step 'work'", 6),
    errors.RunInactiveError("r"),
    errors.AlreadyAnsweredError("r", "approve", "|?approve::|1", True, "ann"),
    errors.OutsideRunError("called outside of a workflow"),
    errors.RunFailedError("r", error_type="KeyError", error_message="'x'", error_traceback="…"),
    errors.RunCancelledError("r", "by hand"),
    errors.UnknownRunError("r", "state"),
]


def kinds(root: type[MaestroError]) -> set[type[MaestroError]]:
    own = {root} if root.__module__ == errors.__name__ else set()
    return own.union(*(kinds(child) for child in root.__subclasses__()))


def test_there_is_an_example_of_every_error() -> None:
    assert {type(example) for example in EXAMPLES} == kinds(MaestroError)


def test_every_error_stands_in_the_tree_that_the_module_draws() -> None:
    assert errors.__doc__ is not None
    drawn = set(errors.__doc__.replace("─", " ").split())
    assert {kind.__name__ for kind in kinds(MaestroError)} <= drawn


def pickled(error: MaestroError) -> MaestroError:
    read = pickle.loads(pickle.dumps(error))
    assert isinstance(read, MaestroError)
    return read


@for_each("example", EXAMPLES, ids=lambda example: type(example).__name__)
@for_each("how", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_has_the_same_type_text_and_facts(
    example: MaestroError, how: Callable[[MaestroError], MaestroError]
) -> None:
    copied = how(example)
    assert copied is not example
    assert type(copied) is type(example)
    assert str(copied) == str(example)
    assert copied.args == example.args
    assert vars(copied) == vars(example)


def test_a_note_travels_with_its_error() -> None:
    error = errors.FolderError(Path("/a"), "is not a folder")
    error.add_note("seen while opening")
    assert pickled(error).__notes__ == ["seen while opening"]


@for_each("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_every_error_says_something_and_keeps_its_arguments_as_facts(example: MaestroError) -> None:
    assert str(example)
    assert not any(name.startswith("_") for name in vars(example))
