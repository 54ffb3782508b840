"""The shape of an answer: stored as plain JSON, checked by who does not have the class."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, field_validator

from maestro_hive.hive.answer_types import ShapeError, build, check, describe, shape_of
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from tests.tables import for_each


class Decision(Enum):
    APPROVE = "approve"
    REJECT = "reject"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Odd(Enum):
    PAIR = (1, 2)


@dataclass
class Address:
    street: str
    zip: int | None = None


@dataclass
class Order:
    amount: float
    note: str = ""
    tags: list[str] = field(default_factory=list)
    to: Address | None = None
    total: float = field(init=False, default=0.0)


@dataclass
class Picky:
    amount: int

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise ValueError("amount is negative")


@dataclass
class Node:
    children: list[Node]


@dataclass
class Lost:
    what: Nowhere  # type: ignore[name-defined]  # noqa: F821 - that is the test


class Refund(BaseModel):
    amount: float = Field(gt=0)
    decision: Decision
    order: Order | None = None
    by: str = Field(default="nobody", alias="answeredBy")

    @field_validator("by")
    @classmethod
    def _named(cls, by: str) -> str:
        if by == "me":
            raise ValueError("say who")
        return by


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    amount: int


ODD_CHOICES = Literal["a", 1, True, None]  # noqa: PYI061 - it may be written so

TYPES: list[Any] = [
    *(None, Any, object, bool, int, float, str, list, dict, type(None), Decision, Level, Odd),
    *(ODD_CHOICES, Optional[int], int | str, list[int], dict[str, list[Decision]]),  # noqa: UP045
    *(Annotated[int, "of it"], Order, Address | None, list[Order], Refund, Open, Level | None),
]


@for_each("expected", TYPES, ids=str)
def test_a_shape_is_plain_json_and_can_be_described(expected: Any) -> None:
    shape = shape_of(expected)
    assert json.loads(json.dumps(shape)) == shape
    assert describe(shape)


@for_each(
    "expected",
    [
        *(bytes, set, tuple[int, ...], dict[int, str], Literal[b"x"], Literal[Level.LOW]),
        *(list[bytes], int | bytes, Node, Lost, "Order", 5, {"amount": int}, [int], print),
    ],
    ids=repr,
)
def test_a_type_that_cannot_be_asked_for_is_refused(expected: Any) -> None:
    with pytest.raises(ConfigurationError, match="an answer cannot have the type"):
        shape_of(expected)


GOOD: list[tuple[Any, Any, Any]] = [
    (None, {"what": ["ever", None]}, {"what": ["ever", None]}),
    (bool, False, False),
    (int, 3, 3),
    (float, 3, 3.0),
    (float, 0.5, 0.5),
    (str, "yes", "yes"),
    (list, [1, "x"], [1, "x"]),
    (dict, {"a": 1}, {"a": 1}),
    (type(None), None, None),
    (Literal["a", 1], 1, 1),
    (Decision, "APPROVE", Decision.APPROVE),
    (Decision, "reject", Decision.REJECT),
    (Level, 2, Level.HIGH),
    (Level, "LOW", Level.LOW),
    (Odd, "PAIR", Odd.PAIR),
    (int | None, None, None),
    (float | int, 3, 3),
    (list[float], [1, 2.5], [1.0, 2.5]),
    (dict[str, list[Decision]], {"x": ["REJECT"]}, {"x": [Decision.REJECT]}),
    (Address | None, {"street": "Elm"}, Address("Elm")),
    (
        Order,
        {"amount": 5, "tags": ["new"], "to": {"street": "Elm", "zip": 7}},
        Order(5.0, tags=["new"], to=Address("Elm", 7)),
    ),
    (Open, {"amount": 1, "more": [2]}, Open(amount=1, more=[2])),  # type: ignore[call-arg]
]


@for_each("expected, value, built", GOOD, ids=str)
def test_a_good_value_becomes_what_was_asked_for(expected: Any, value: Any, built: Any) -> None:
    check(shape_of(expected), value)
    made = build(expected, value)
    assert made == built
    assert type(made) is type(built)


def test_a_model_is_made_with_what_is_inside_it() -> None:
    value = {"amount": 2, "decision": "APPROVE", "order": {"amount": 1}, "answeredBy": "ann"}
    check(shape_of(Refund), value)
    made = build(Refund, value)
    assert isinstance(made, Refund)
    assert (made.decision, made.order, made.by) == (Decision.APPROVE, Order(1.0), "ann")


BAD: list[tuple[Any, Any, str]] = [
    (bool, 1, "answer is 1, and must be yes or no"),
    (int, True, "answer is True, and must be a whole number"),
    (int, 1.0, "answer is 1.0, and must be a whole number"),
    (float, False, "answer is False, and must be a number"),
    (float, 10**400, "and must be a number"),
    (float, float("nan"), "answer is nan, and must be a number"),
    (str, 5, "answer is 5, and must be text"),
    (str, None, "answer is None, and must be text"),
    (Literal["a", 1], True, "answer is True, and must be one of: a, 1"),
    (Decision, "maybe", "answer is 'maybe', and must be one of: APPROVE, REJECT"),
    (int | None, "x", "answer is 'x', and must be a whole number or nothing"),
    (list[int], [1, "x"], "answer[1] is 'x', and must be a whole number"),
    (dict[str, int], {"a b": "x"}, "answer['a b'] is 'x', and must be a whole number"),
    (Order, {"amount": "x"}, "answer.amount is 'x', and must be a number"),
    (Order, {}, "answer.amount is missing, and must be a number"),
    (
        Order,
        {"amount": 1, "amout": 2},
        "answer.amout is not a field; the fields are: amount, note, tags, to",
    ),
    (Order, {"amount": 1, "total": 2}, "answer.total is not a field"),
    (Order, {"amount": 1, "to": {"zip": 5}}, "answer.to.street is missing, and must be text"),
    (Order, [1], "answer is [1], and must be an object with: amount (number)"),
    (Refund, {"amount": 1, "decision": 1}, "answer.decision is 1, and must be one of: APPROVE"),
    (str, ["x" * 200], "and must be text"),
]


@for_each("expected, value, message", BAD, ids=str)
def test_a_wrong_value_is_refused_with_its_place_and_what_is_expected(
    expected: Any, value: Any, message: str
) -> None:
    with pytest.raises(ShapeError) as refused:
        check(shape_of(expected), value)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 250
    with pytest.raises(ShapeError):
        build(expected, value)


def test_the_error_is_one_of_ours_and_names_the_path_it_was_given() -> None:
    with pytest.raises(MaestroError) as refused:
        check(shape_of(Order), {"amount": "x"}, "the answer")
    assert isinstance(refused.value, ShapeError)
    assert refused.value.path == "the answer.amount"


@for_each(
    "expected, value, message",
    [
        (Picky, {"amount": -1}, "answer is not what Picky accepts as its fields: amount is neg"),
        (list[Picky], [{"amount": -1}], "answer[0] is not what Picky accepts"),
        (Refund, {"amount": -1, "decision": "REJECT"}, "greater than 0"),
        (Refund, {"amount": 1, "decision": "REJECT", "answeredBy": "me"}, "say who"),
    ],
)
def test_what_the_class_itself_refuses_is_an_error_of_ours(
    expected: Any, value: Any, message: str
) -> None:
    with pytest.raises(ShapeError) as refused:
        build(expected, value)
    assert message in str(refused.value)
    assert refused.value.__cause__ is not None


# --- for people -----------------------------------------------------------------------------------


@for_each(
    "expected, words",
    [
        (None, "anything"),
        (bool, "yes or no"),
        (int, "a whole number"),
        (Literal["approve", "reject", 3], "one of: approve, reject, 3"),
        (None | int, "a whole number or nothing"),
        (list, "a list"),
        (list[str], "a list (each text)"),
        (dict[str, float], "an object (each value number)"),
        (
            Order,
            (
                "an object with: amount (number), note (text, optional), tags (list (each text),"
                " optional), to (object with: street (text), zip (whole number or nothing,"
                " optional) or nothing, optional)"
            ),
        ),
    ],
    ids=str,
)
def test_a_shape_is_described_for_people(expected: Any, words: str) -> None:
    assert describe(shape_of(expected)) == words


def test_a_question_without_a_shape_takes_anything() -> None:
    check(None, {"a": 1})
    assert describe(None) == "anything"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.sampled_from(TYPES), plain)
def test_a_value_either_has_the_shape_and_is_built_or_is_refused(expected: Any, value: Any) -> None:
    shape = shape_of(expected)
    try:
        check(shape, value)
    except ShapeError:
        with pytest.raises(ShapeError):
            build(expected, value)
    else:
        if expected is not Refund:  # which refuses more than its shape can say
            build(expected, value)


def test_pydantic_is_not_needed() -> None:
    import subprocess

    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from maestro_hive.hive.answer_types import shape_of; print(shape_of(bool))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'type': 'boolean'}"
