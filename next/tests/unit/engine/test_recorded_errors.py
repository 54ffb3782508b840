"""Exceptions come back as themselves: same class, arguments, attributes, notes and causes."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maestro_hive.journal import user_classes
from maestro_hive.journal.recorded_errors import (
    MAX_BYTES,
    FailedAttempt,
    StepFailure,
    attach_failure,
    decode_error,
    encode_error,
    failure_of,
    make_error,
)
from maestro_hive.kernel.errors import EncodeError, FolderError, RecordedError
from tests.tables import for_each


def read_back(error: BaseException) -> Exception:
    """Return the error that is made of the record of this one."""
    return decode_error(encode_error(error))


def error_tree(error: BaseException) -> dict[str, Any]:
    """Return the record of an error as plain JSON."""
    tree: dict[str, Any] = json.loads(encode_error(error))
    return tree


# --- the errors of users --------------------------------------------------------------------------


class Response:
    """Like that of an HTTP client: it cannot be encoded."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code

    def __repr__(self) -> str:
        return f"<Response [{self.status_code}]>"


class APIError(Exception):
    def __init__(self, message: str, *, body: object | None) -> None:
        super().__init__(message)
        self.message = message
        self.body = body


class APIStatusError(APIError):
    def __init__(self, message: str, *, response: Response, body: object | None) -> None:
        super().__init__(message, body=body)
        self.response = response
        self.status_code = response.status_code


class RateLimitError(APIStatusError):
    """The same shape as that of the openai package."""


class OutOfStockError(Exception):
    """As most people write them."""

    def __init__(self, sku: str, left: int) -> None:
        super().__init__(f"{sku}: {left} left")
        self.sku = sku
        self.left = left


@dataclass
class RefusedError(Exception):
    order: str
    codes: tuple[int, ...]


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


@dataclass(slots=True)
class SlotsDataclassError(Exception):
    code: int
    note: str | None = None


class SlotsError(Exception):
    __slots__ = ("code", "detail", "unset")

    def __init__(self, code: int) -> None:
        self.code = code
        self.detail = None


class NewError(Exception):
    def __new__(cls, code: int, *, detail: str) -> Self:
        made = super().__new__(cls, code)
        made.detail = detail
        return made

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(code)

    detail: str


class ReduceError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("no arguments that fit the constructor", code)

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class UrlError(Exception):
    """Like that of aiohttp: its text is made of what cannot be encoded."""

    def __init__(self, response: Response, status: int) -> None:
        super().__init__("refused")
        self.response = response
        self.status = status

    def __str__(self) -> str:
        return f"{self.status} from {self.response.status_code}"


class FileError(OSError):
    """One with a constructor: then the fields of ``OSError`` are not set by ``__new__``."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOENT, "not there", path)
        self.path = path


class BothError(ValueError, OSError):
    """Its layout is that of the second base."""


class CodedGroup(ExceptionGroup[Exception]):
    def __new__(cls, errors: list[Exception], code: int) -> Self:
        made = super().__new__(cls, "all of it", errors)
        made.code = code
        return made

    code: int


class Model(pydantic.BaseModel):
    age: int


@dataclass
class Report:
    persona: str
    context: list[Any] = field(default_factory=list)


def raised(error: Exception) -> Exception:
    """Return the error as it is when it is caught."""

    def fail() -> None:
        raise error

    return of_call(fail)


def of_call(call: Any, *args: Any) -> Exception:
    """Return what a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it raises
        call(*args)
    return caught.value


def bare(error: Exception) -> Exception:
    """Return an error as if it was not raised."""
    return error.with_traceback(None)


def shape(error: BaseException | None) -> object:
    """Return everything that is compared of an error."""
    if error is None:
        return None
    slots = {
        name: getattr(error, name, "unset")
        for name in ("errno", "strerror", "filename", "code", "detail", "note", "object", "start")
    }
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    values = {
        name: shape(value) if isinstance(value, BaseException) else value
        for name, value in vars(error).items()
    }
    args = tuple(shape(each) if isinstance(each, BaseException) else each for each in error.args)
    return (
        type(error),
        repr(args) if not parts else None,
        list(values),
        repr(values),
        repr(slots),
        [shape(part) for part in parts],
        shape(error.__cause__),
        shape(error.__context__),
        error.__suppress_context__,
    )


EXAMPLES: list[Exception] = [
    OutOfStockError("sku-1", 2),
    RefusedError("o-1", (1, 2)),
    FrozenError(3),
    SlotsDataclassError(4),
    SlotsError(5),
    NewError(6, detail="x"),
    ReduceError(7),
    KeyError("name"),
    FileNotFoundError(errno.ENOENT, "not there", "a.txt"),
    OSError(errno.ENOENT, "not there", "a.txt", None, "b.txt"),
    FileError("a.txt"),
    BothError("x"),
    bare(of_call(b"\xff".decode)),
    bare(of_call("\xe9".encode, "ascii")),
    StopIteration(3),
    bare(of_call(json.loads, "{")),
    subprocess.CalledProcessError(2, ["ls", "-l"], b"out", b"err"),
    TimeoutError(),
    SyntaxError("bad", ("a.py", 1, 2, "x y", 1, 3)),
    bare(of_call(compile, "x y", "a.py", "exec")),
    ImportError("no such", name="a", path="/a"),
    bare(of_call(lambda: missing)),  # type: ignore[name-defined]  # noqa: F821
    ExceptionGroup("both", [ValueError(1), ExceptionGroup("in", [OutOfStockError("s", 0)])]),
    ArithmeticError(1, 2.5, None, (1, b"x"), {"b": 1, "a": datetime(2030, 1, 1, tzinfo=UTC)}),
    APIError("busy", body=OutOfStockError("s", 1)),
    APIError("gave up", body=Report("writer", context=[{"b": 1, "a": 2}])),
    FolderError(Path("/a"), "is not a folder"),
    EncodeError("result.users[3]", "no form"),
    RecordedError("app.Gone", "x", "its class is gone"),
]


@for_each("error", EXAMPLES, ids=lambda each: type(each).__name__)
def test_an_exception_comes_back_as_itself(error: Exception) -> None:
    made = read_back(error)
    assert made is not error
    assert shape(made) == shape(error)
    assert str(made) == str(error)
    assert made.__traceback__ is None


@for_each("error", EXAMPLES, ids=lambda each: type(each).__name__)
def test_an_error_is_made_of_the_tree_of_its_text(error: Exception) -> None:
    """An entry is read with the error in it."""
    assert shape(make_error(error_tree(error))) == shape(read_back(error))


def test_the_constructor_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    error, other = OutOfStockError("sku-1", 2), NewError(1, detail="x")

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(OutOfStockError, "__init__", refuse)
    monkeypatch.setattr(NewError, "__new__", refuse)
    assert vars(read_back(error)) == {"sku": "sku-1", "left": 2}
    assert vars(read_back(other)) == {"detail": "x"}


def test_an_error_of_a_model_provider_comes_back_without_its_response() -> None:
    body = {"code": "rate_limit", "a": [1]}
    error = RateLimitError("slow down", response=Response(429), body=body)
    made = read_back(error)
    assert type(made) is RateLimitError
    assert str(made) == "slow down"
    assert (made.status_code, made.body, made.message) == (429, body, "slow down")
    assert made.body is not body
    assert not hasattr(made, "response")


def test_the_order_of_attributes_and_of_what_is_in_them_is_recorded() -> None:
    error = APIError("x", body={"z": 1, "a": 2})
    vars(error)["b"] = vars(error).pop("message")
    made: Any = read_back(error)
    assert list(vars(made)) == ["body", "b"]
    assert list(made.body) == ["z", "a"]


def test_an_argument_that_cannot_be_encoded_is_its_text() -> None:
    assert read_back(ValueError(Response(500), 1)).args == ("<Response [500]>", 1)
    assert str(read_back(ValueError(Response(500)))) == "<Response [500]>"


def test_an_argument_that_is_an_exception_comes_back() -> None:
    (first, second) = read_back(ValueError("x", OutOfStockError("s", 1))).args
    assert first == "x"
    assert type(second) is OutOfStockError
    assert second.sku == "s"


def test_the_object_that_lacks_an_attribute_is_not_recorded() -> None:
    report = Report("secret")
    error = of_call(getattr, report, "colour")
    assert isinstance(error, AttributeError)
    assert error.obj is report
    made = read_back(error)
    assert isinstance(made, AttributeError)
    assert (made.name, made.obj) == ("colour", None)
    assert "secret" not in json.dumps(error_tree(error))


def test_what_a_step_changes_afterwards_is_not_in_the_error() -> None:
    codes = [1]
    error = ValueError(codes)
    made = read_back(error)
    codes.append(2)
    assert made.args == ([1],)


def test_a_text_that_another_error_would_print_is_a_note() -> None:
    made = read_back(UrlError(Response(404), 429))
    assert type(made) is UrlError
    assert made.status == 429
    assert made.__notes__ == ["Recorded message: 429 from 404"]
    assert shape(read_back(made)) == shape(made)


def test_an_error_that_cannot_print_itself_comes_back() -> None:
    made = read_back(SilentError(1))
    assert type(made) is SilentError
    assert made.args == (1,)
    with pytest.raises(RuntimeError, match="no text"):
        str(made)


@for_each("error", EXAMPLES, ids=lambda each: type(each).__name__)
def test_reading_back_twice_is_reading_back_once(error: Exception) -> None:
    once = read_back(raised(error))
    assert shape(read_back(once)) == shape(once)


# --- notes, causes, tracebacks --------------------------------------------------------------------


def sell() -> None:
    raise OutOfStockError("sku-1", 0)


def order() -> None:
    try:
        sell()
    except OutOfStockError as error:
        raise RefusedError("o-1", (1,)) from error


def test_notes_come_back_and_the_lines_of_the_user_are_one_more() -> None:
    error = of_call(sell)
    error.add_note("tried twice")
    made = read_back(error)
    first, lines = made.__notes__
    assert first == "tried twice"
    assert lines.startswith("Recorded traceback (most recent call last):\n  File ")
    assert lines.endswith('in sell\n    raise OutOfStockError("sku-1", 0)')
    assert "in sell" in "".join(traceback.format_exception(made))


def test_our_lines_and_those_of_asyncio_are_not_recorded() -> None:
    async def wait() -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(1)

    (note,) = read_back(of_call(asyncio.run, wait())).__notes__
    assert "in wait\n" in note
    assert "asyncio/" not in note


def test_a_text_that_is_cut_does_not_end_in_half_a_secret() -> None:
    secret = "sk-ant-" + "a1B2c3D4e5" * 9
    made = read_back(ValueError("x " * 1_980 + secret + " x" * MAX_BYTES))
    assert len(made.args[0]) == 4_000
    assert "sk-ant" not in made.args[0]
    assert "[redacted]" in made.args[0]


def test_an_error_that_was_never_raised_has_no_lines() -> None:
    assert not hasattr(read_back(ValueError(1)), "__notes__")


def test_a_note_that_is_no_text_is_left_out() -> None:
    error = ValueError(1)
    vars(error)["__notes__"] = [1, "x"]
    assert read_back(error).__notes__ == ["x"]
    vars(error)["__notes__"] = 7
    assert not hasattr(read_back(error), "__notes__")


def test_causes_come_back_with_lines_of_their_own() -> None:
    made = read_back(of_call(order))
    assert isinstance(made.__cause__, OutOfStockError)
    assert made.__cause__.sku == "sku-1"
    assert "in sell" in made.__cause__.__notes__[0]
    assert made.__suppress_context__


def test_the_context_comes_back_unless_it_is_suppressed() -> None:
    def shown() -> None:
        try:
            sell()
        except OutOfStockError:
            raise ValueError(1)  # noqa: B904 - the context is the subject

    def suppressed() -> None:
        try:
            sell()
        except OutOfStockError:
            raise ValueError(1) from None

    made = read_back(of_call(shown))
    assert made.__cause__ is None
    assert isinstance(made.__context__, OutOfStockError)
    made = read_back(of_call(suppressed))
    assert made.__suppress_context__
    assert made.__context__ is None


def test_a_chain_that_leads_back_to_itself_ends() -> None:
    first, second = ValueError(1), TypeError(2)
    first.__cause__, second.__cause__ = second, first
    made = read_back(first)
    assert isinstance(made.__cause__, TypeError)
    assert made.__cause__.__cause__ is None


def test_a_long_chain_is_cut() -> None:
    error = ValueError(0)
    for number in range(1, 500):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    made: BaseException | None = read_back(error)
    length = 0
    while made is not None:
        made, length = made.__cause__, length + 1
    assert 5 < length < 50


# --- groups ---------------------------------------------------------------------------------------


def test_a_group_of_the_users_comes_back_with_its_attributes() -> None:
    made = read_back(CodedGroup([OutOfStockError("s", 1), ValueError(2)], 7))
    assert type(made) is CodedGroup
    assert made.code == 7
    assert [type(each) for each in made.exceptions] == [OutOfStockError, ValueError]
    matching, rest = made.split(OutOfStockError)
    assert matching is not None
    assert rest is not None


def test_a_large_group_is_cut_and_says_so() -> None:
    made = read_back(ExceptionGroup("many", [ValueError(each) for each in range(1000)]))
    assert isinstance(made, ExceptionGroup)
    *first, last = made.exceptions
    assert [each.args for each in first[:2]] == [(0,), (1,)]
    assert isinstance(last, RecordedError)
    assert last.message == f"{1000 - len(first)} more errors, which were not recorded"


# --- what cannot be made --------------------------------------------------------------------------


def test_a_class_inside_a_function_has_a_stand_in() -> None:
    class LocalError(Exception):
        pass

    made = read_back(raised(LocalError("x")))
    assert type(made) is RecordedError
    assert made.type_name.endswith("<locals>.LocalError")
    assert made.message == "x"
    assert "defined inside a function" in made.reason
    assert str(made) == f"{made.type_name}: x"
    assert "LocalError" in made.__notes__[-1]
    assert shape(make_error(error_tree(LocalError("x")))) == shape(read_back(LocalError("x")))
    assert shape(read_back(made)) == shape(made)


def test_an_error_of_pydantic_has_a_stand_in_with_its_message() -> None:
    made = read_back(of_call(Model.model_validate, {"age": "x"}))
    assert type(made) is RecordedError
    assert made.type_name == "pydantic_core._pydantic_core.ValidationError"
    assert "should be a valid integer" in made.message
    assert "register_codec" in made.reason


def test_a_registered_codec_makes_what_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_classes, "codecs", user_classes.Codecs())
    kind = pydantic.ValidationError
    user_classes.register_codec(
        kind,
        lambda error: {"title": error.title, "errors": error.errors(include_url=False)},
        lambda read: kind.from_exception_data(read["title"], read["errors"]),
    )
    error = of_call(Model.model_validate, {"age": "x"})
    made = read_back(error)
    assert type(made) is kind
    assert str(made) == str(error)


def test_a_codec_that_does_not_give_an_error_back_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_classes, "codecs", user_classes.Codecs())
    user_classes.register_codec(OutOfStockError, lambda _: 1, lambda read: read)
    made = read_back(OutOfStockError("s", 1))
    assert type(made) is OutOfStockError
    assert made.sku == "s"


@for_each("error", [KeyboardInterrupt(), SystemExit(2), asyncio.CancelledError(), GeneratorExit()])
def test_what_is_not_an_exception_has_a_stand_in(error: BaseException) -> None:
    made = read_back(error)
    assert type(made) is RecordedError
    assert made.type_name.endswith(type(error).__name__)
    group = read_back(BaseExceptionGroup("x", [error]))
    assert type(group) is RecordedError


def test_a_stand_in_has_the_cause_and_the_notes() -> None:
    class LocalError(Exception):
        pass

    error = LocalError("x")
    error.__cause__ = OutOfStockError("s", 1)
    error.add_note("first")
    made = read_back(error)
    assert isinstance(made.__cause__, OutOfStockError)
    assert made.__notes__[0] == "first"


def test_a_class_that_is_gone_after_a_restart_has_a_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = error_tree(OutOfStockError("sku-1", 2))
    monkeypatch.delattr(sys.modules[__name__], "OutOfStockError")
    made = make_error(tree)
    assert isinstance(made, RecordedError)
    assert made.type_name == f"{__name__}.OutOfStockError"
    assert made.message == "sku-1: 2 left"
    assert "is not in this process" in made.reason


def test_a_class_is_not_imported_by_its_name() -> None:
    tree = {**error_tree(ValueError("x")), "class": "this:Anything"}
    assert "this" not in sys.modules
    made = make_error(tree)
    assert isinstance(made, RecordedError)
    assert "import this first" in made.reason
    assert "this" not in sys.modules


def test_a_name_that_is_now_something_else_is_not_called() -> None:
    for name in ("builtins:print", "builtins:dict", "builtins:SystemExit", "nonsense", ""):
        made = make_error({**error_tree(ValueError("x")), "class": name})
        assert isinstance(made, RecordedError)


def test_an_attribute_whose_class_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    error = APIError("x", body=Report("a"))
    error.args = ("x", Report("b"))
    tree = error_tree(error)
    monkeypatch.delattr(sys.modules[__name__], "Report")
    made: Any = make_error(tree)
    assert type(made) is APIError
    assert vars(made) == {"message": "x"}
    assert made.args[0] == "x"
    assert '"persona":"b"' in made.args[1]


def test_fields_of_another_type_cannot_break_the_interpreter() -> None:
    """The text of a UnicodeDecodeError reads its bytes without checking what they are."""
    tree = error_tree(of_call(b"\xff".decode))
    tree["fields"] = [
        [name, {"value": 1} if name == "object" else item] for name, item in tree["fields"]
    ]
    made = make_error(tree)
    assert type(made) is UnicodeDecodeError
    assert str(made) == ""


# --- the program that was started -----------------------------------------------------------------

PROGRAM = """
import json, sys
from maestro_hive.journal.recorded_errors import encode_error, make_error

class OutOfStockError(Exception):
    pass

if __name__ == "__main__":
    tree = json.loads(encode_error(OutOfStockError("x")))
    assert type(make_error(tree)) is OutOfStockError
    print(json.dumps(tree))
"""


def test_the_program_and_the_module_of_its_name_agree(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM)
    tree = subprocess.run(
        [sys.executable, "shop.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(tree)["class"] == "shop:OutOfStockError"
    code = (
        "import json, sys, shop\n"
        "made = shop.make_error(json.loads(sys.argv[1]))\n"
        "assert type(made) is shop.OutOfStockError, repr(made)\n"
        "print(json.loads(shop.encode_error(made)) == json.loads(sys.argv[1]))"
    )
    again = subprocess.run(
        [sys.executable, "-c", code, tree], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert again == "True\n"


# --- size -----------------------------------------------------------------------------------------


def test_a_large_attribute_is_left_out_and_the_others_are_not() -> None:
    error = APIError("x", body="b" * MAX_BYTES)
    vars(error)["code"] = 7
    made = read_back(error)
    assert vars(made) == {"message": "x", "code": 7, "__notes__": made.__notes__}
    assert made.__notes__ == ["Not recorded, over the limit of 1,048,576 bytes: body"]


def test_all_that_fits_comes_back() -> None:
    body = ["b" * 100_000] * 7
    made = read_back(APIError("x", body=body))
    assert vars(made) == {"message": "x", "body": body}


def test_attributes_are_left_out_before_arguments() -> None:
    error = ValueError("b" * 500_000)
    vars(error).update({f"a{number}": "b" * 200_000 for number in range(10)})
    made = read_back(error)
    assert made.args == ("b" * 500_000,)
    (note,) = made.__notes__
    assert list(vars(made)) == ["a0", "__notes__"]
    assert note.endswith(": a1, a2, a3, a4, a5, a6, a7, a8, a9")


def test_a_large_attribute_leaves_room_for_notes_and_causes() -> None:
    error = ValueError("x")
    vars(error)["body"] = "b" * (MAX_BYTES - 4_000)
    error.add_note("first")
    error.__cause__ = OutOfStockError("s", 1)
    made = read_back(error)
    assert made.__notes__[0] == "first"
    assert shape(made.__cause__) == shape(error.__cause__)


def test_a_long_message_is_cut() -> None:
    made = read_back(ValueError("x" * 2_000_000))
    (message,) = made.args
    assert message == "x" * len(message)
    assert 1_000 <= len(message) < 10_000
    assert made.__notes__ == ["Not recorded, over the limit of 1,048,576 bytes: args[0]"]


def test_arguments_without_end_are_cut() -> None:
    made = read_back(ValueError(*range(5_000)))
    assert made.args == tuple(range(1_000))
    assert "args[1000:]" in made.__notes__[0]


@pytest.mark.parametrize("letter", ["x", "\x00", "é", "😀", "\ud800", '"'])
def test_a_tree_has_a_bounded_size(letter: str) -> None:
    def make(depth: int) -> Exception:
        error = ValueError(*[letter * 9_000] * 9)
        vars(error).update({f"a{number}": letter * 9_000 for number in range(9)})
        for _ in range(30):
            error.add_note(letter * 9_000)
        if not depth:
            return error
        error.__cause__ = make(depth - 1)
        return ExceptionGroup(letter * 9_000, [make(depth - 1), error])

    error = make(2)
    data = encode_error(error)
    assert len(data) <= MAX_BYTES
    assert data == encode_error(error)
    once = decode_error(data)
    assert type(once) is ExceptionGroup
    assert len(encode_error(once)) <= MAX_BYTES


def test_an_error_of_many_large_ones_has_a_bounded_size() -> None:
    error: Exception = ExceptionGroup("g", [APIError("x", body="b" * 90_000) for _ in range(60)])
    for number in range(15):
        outer = ValueError(*["\x00" * 9_000] * 1_000, number)
        outer.__cause__, error = error, outer
    data = encode_error(error)
    assert len(data) <= MAX_BYTES
    once = decode_error(data)
    assert type(once) is ValueError
    assert once.args[0] == "\x00" * 9_000


# --- what failed ----------------------------------------------------------------------------------


def failure() -> StepFailure:
    attempt = FailedAttempt(
        number=1,
        status="failed",
        started_at=datetime(2030, 1, 1, tzinfo=UTC),
        ended_at=datetime(2030, 1, 1, 0, 0, 1, tzinfo=UTC),
        error_type="OutOfStockError",
        message="sku-1: 0 left",
        tokens=12,
    )
    return StepFailure(step="sell", persona="clerk", attempts=(attempt,), rounds=1, ticket="OPS-1")


def test_an_error_of_no_step_has_no_failure() -> None:
    assert failure_of(ValueError(1)) is None


@pytest.mark.parametrize("error", [ValueError(1), FrozenError(1), SlotsError(1)], ids=repr)
def test_a_failure_is_attached_to_an_error(error: Exception) -> None:
    attach_failure(error, failure())
    assert failure_of(error) == failure()

    def again() -> None:
        raise error from KeyError(1)

    def another() -> None:
        raise ValueError(2) from error

    assert failure_of(of_call(again)) == failure()
    caught = of_call(another)
    assert failure_of(caught) is None
    assert caught.__cause__ is not None
    assert failure_of(caught.__cause__) == failure()


def test_a_failure_is_read_back_with_its_error_and_is_no_attribute() -> None:
    error = OutOfStockError("s", 1)
    attach_failure(error, failure())
    tree = error_tree(error)
    assert "fields" not in tree
    assert [name for name, _ in tree["attributes"]] == ["sku", "left"]
    assert failure_of(make_error(tree)) == failure()


def test_a_failure_in_a_form_of_another_version_is_left_out() -> None:
    error = OutOfStockError("s", 1)
    attach_failure(error, failure())
    tree = error_tree(error)
    tree["failure"]["rounds"] = "many"
    made = make_error(tree)
    assert type(made) is OutOfStockError
    assert failure_of(made) is None


# --- anything -------------------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.dates()
    | st.builds(Response, st.integers())
)
values = (
    leaves
    | st.lists(leaves, max_size=3)
    | st.tuples(leaves, st.lists(leaves, max_size=2))
    | st.dictionaries(st.text(max_size=5), leaves, max_size=3)
)
KINDS: list[type[Exception]] = [
    ValueError,
    KeyError,
    OSError,
    OutOfStockError,
    SlotsError,
    SilentError,
    LookupError,
]


@st.composite
def errors(draw: st.DrawFn, depth: int = 2) -> Exception:
    """Return an error with arguments, attributes and notes, and with others that belong to it."""
    kind: type[Exception] = draw(
        st.sampled_from([*KINDS, RefusedError, RateLimitError, ExceptionGroup])
    )
    error: Exception
    if kind is ExceptionGroup and depth:
        parts = [draw(errors(depth - 1)) for _ in range(draw(st.integers(1, 3)))]
        error = ExceptionGroup(draw(st.text(max_size=5)), parts)
    elif kind is RateLimitError:
        error = RateLimitError("slow down", response=Response(429), body=draw(values))
    elif kind is RefusedError:
        error = RefusedError(draw(st.text(max_size=5)), (draw(st.integers()),))
    else:
        made: Any = ValueError if kind is ExceptionGroup else kind
        error = made.__new__(made, *draw(st.lists(values, max_size=3)))
    names = st.sampled_from(["a", "b", "__c", "é"])
    vars(error).update(draw(st.dictionaries(names, values, max_size=3)))
    for note in draw(st.lists(st.text(max_size=5), max_size=2)):
        error.add_note(note)
    if depth and draw(st.booleans()):
        error.__context__ = draw(errors(depth - 1))
        error.__suppress_context__ = draw(st.booleans())
    if depth and draw(st.booleans()):
        vars(error)["other"] = draw(errors(depth - 1))
    return error


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(errors())
def test_any_error_comes_back_and_then_always_the_same(error: Exception) -> None:
    data = encode_error(error)
    assert len(data) <= MAX_BYTES
    once = decode_error(data)
    assert type(once) is type(error)
    assert shape(once) == shape(decode_error(data))
    assert shape(read_back(once)) == shape(once)
