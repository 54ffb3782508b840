"""The types that steps declare of their results: read as they are written, and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NotRequired, Required, TypedDict, TypeVar

import pytest
from pydantic import BaseModel

from maestro_hive.engine.errors import ResultTypeError
from maestro_hive.engine.options import StepOptions
from maestro_hive.engine.result_types import result_check
from maestro_hive.kernel.errors import ConfigurationError
from tests.tables import for_each


def problems(returns: Any, value: Any) -> list[str]:
    check = result_check(returns, problems, "a result")
    assert check is not None
    try:
        check(value)
    except ResultTypeError as error:
        return error.problems
    return []


# --- TypedDict ------------------------------------------------------------------------------------


class Base(TypedDict):
    name: str


class Page(Base, total=False):
    """Its annotations are texts: this module postpones them."""

    title: Required[str]
    size: int
    note: NotRequired[Annotated[str, "shown"]]


class Whole(TypedDict):
    title: str
    note: NotRequired[str]


FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")


class Pair(TypedDict, Generic[FirstT, SecondT]):
    first: FirstT
    second: SecondT


def test_keys_that_are_not_required_may_be_missing() -> None:
    assert problems(Whole, {"title": "t"}) == []
    assert problems(Page, {"name": "n", "title": "t"}) == []


def test_keys_that_are_required_may_not() -> None:
    assert problems(Whole, {"note": "n"}) == ["result.title: is missing"]
    assert problems(Page, {"size": 3}) == ["result.name: is missing", "result.title: is missing"]


def test_keys_that_are_there_are_checked() -> None:
    given = {"name": "n", "title": "t", "note": 5}
    assert problems(Page, given) == ["result.note: must be a str, and is a int"]


def test_one_that_is_defined_in_a_function_is_read_as_far_as_it_can_be() -> None:
    class Unknown: ...

    class Local(TypedDict):
        title: str
        other: NotRequired[Unknown]

    assert problems(Local, {"title": "t"}) == []
    assert problems(Local, {}) == ["result.title: is missing"]


def test_a_generic_one_is_no_mapping_of_its_parameters() -> None:
    assert problems(Pair[int, str], {"first": 1, "second": "b"}) == []
    assert problems(Pair[int, str], {"first": 1}) == ["result.second: is missing"]


# --- unions ---------------------------------------------------------------------------------------


class Item(BaseModel):
    price: float


class Order(BaseModel):
    kind: Literal["order"]
    items: list[Item]


class Refund(BaseModel):
    kind: Literal["refund"]
    reason: str
    amount: float


@dataclass
class Point:
    x: int


def test_an_optional_model_tells_the_places() -> None:
    wrong = {"kind": "order", "items": [{"price": "dear"}]}
    (told,) = problems(Order | None, wrong)
    assert told.startswith("result.items[0].price: Input should be a valid number")


def test_of_several_models_the_nearest_tells_its_places() -> None:
    (told,) = problems(Order | Refund, {"kind": "refund", "amount": 3})
    assert told == "result.reason: Field required"


def test_a_union_without_places_names_its_choices() -> None:
    assert problems(Order | None, 5) == ["result: must be a Order or a NoneType, and is a int"]
    assert problems(int | str, 1.5) == ["result: must be a int or a str, and is a float"]


def test_an_optional_list_and_dataclass_tell_the_places() -> None:
    assert problems(list[int] | None, [1, "b"]) == ["result[1]: must be a int, and is a str"]
    wrong: Any = "x"
    assert problems(Point | None, Point(wrong)) == ["result.x: must be a int, and is a str"]


# --- JSON Schema ----------------------------------------------------------------------------------

WITH_REFERENCES: dict[str, dict[str, Any]] = {
    "a definition": {"$ref": "#/$defs/part", "$defs": {"part": {"type": "object"}}},
    "itself": {"properties": {"inner": {"$ref": "#"}}},
    "an anchor": {"$ref": "#part", "$defs": {"a": {"$anchor": "part", "type": "object"}}},
    "an identifier": {
        "$id": "https://example.test/whole",
        "$ref": "part",
        "$defs": {"a": {"$id": "part", "type": "object"}},
    },
    "an old draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"part": {"type": "object"}},
        "properties": {"a": {"$ref": "#/definitions/part"}},
    },
    "a value that looks like one": {"enum": [{"$ref": "#/nowhere"}, {}]},
    "a property of that name": {"properties": {"$ref": {"type": "string"}}},
}


@for_each("schema", WITH_REFERENCES.values(), ids=WITH_REFERENCES)
def test_references_inside_of_a_schema_are_followed(schema: dict[str, Any]) -> None:
    assert problems(schema, {}) == []


@for_each("schema", [{"type": "nothing"}, {"required": 3}])
def test_what_is_no_schema_is_refused_where_the_step_is_made(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"returns is .*, and must be a valid JSON Schema"):
        StepOptions(returns=schema)


# --- annotations ----------------------------------------------------------------------------------


def test_true_means_the_annotation_of_the_function() -> None:
    def work() -> list[int]:
        return []

    check = result_check(True, work, "x")
    assert check is not None
    check([1])
    with pytest.raises(ResultTypeError, match=r"the result is not list\[int\]: result\[0\]"):
        check(["a"])


def test_a_function_without_an_annotation_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no annotation of its result"):
        result_check(True, lambda: None, "step 'x'")
