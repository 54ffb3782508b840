"""What a step declares of its result: read as it is written, checked early, and told to the persona."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NotRequired, Required, TypedDict, TypeVar

import pytest
from pydantic import BaseModel

from maestro_hive import Hive, PersonaExecutor, current
from maestro_hive.engine.result_types import ResultTypeError, result_check
from maestro_hive.kernel.errors import ConfigurationError
from tests.hive.conftest import quick_config
from tests.tables import for_each
from tests.unified_execution.restarts import execute


def problems(returns: Any, value: Any) -> list[str]:
    try:
        result_check(returns, None)(value)
    except ResultTypeError as error:
        return error.problems
    return []


def schema_told(returns: Any, value: Any) -> str | None:
    with pytest.raises(ResultTypeError) as caught:
        result_check(returns, None)(value)
    return caught.value.schema


# --- TypedDict -------------------------------------------------------------------------------------


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


# --- unions ----------------------------------------------------------------------------------------


class Item(BaseModel):
    price: float


class Order(BaseModel):
    kind: Literal["order"]
    items: list[Item]


class Refund(BaseModel):
    kind: Literal["refund"]
    reason: str
    amount: float


class Opaque:
    """What has no schema."""


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


# --- the schema in the feedback --------------------------------------------------------------------


@for_each(
    "returns, wrong",
    [
        (Item, {}),
        (Item | None, {}),
        (list[Item], [{}]),
        (dict[str, Item], {"a": {}}),
        (Annotated[Item, "shown"], {}),
    ],
)
def test_the_schema_of_a_model_is_told(returns: Any, wrong: Any) -> None:
    told = schema_told(returns, wrong)
    assert told is not None
    assert '"required": ["price"]' in told


def test_a_long_schema_is_cut_visibly() -> None:
    fields = {f"a_field_with_a_long_name_{n}": (int, ...) for n in range(100)}
    from pydantic import create_model

    wide: Any = create_model("Wide", **fields)  # type: ignore[call-overload]
    told = schema_told(wide, {})
    assert told is not None
    assert told.endswith("…")


def test_a_model_without_a_schema_is_checked_all_the_same() -> None:
    class Odd(BaseModel, arbitrary_types_allowed=True):
        place: Opaque

    assert schema_told(Odd, {}) is None
    assert schema_told(int, "x") is None


def test_a_persona_gets_the_schema_of_its_model() -> None:
    told: list[str] = []

    def work() -> Any:
        told.extend(current().feedback)
        return {"price": 1.0} if told else {"cost": 1.0}

    execute(PersonaExecutor(quick_config()).options(returns=Item), work, "work")
    assert '"required": ["price"]' in told[-1]
    assert "result.price: Field required" in told[-1]


# --- references ------------------------------------------------------------------------------------

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


@for_each("place", ["whole", "property", "items", "definition"])
@for_each("reference", ["#/$defs/missing", "#missing", "https://example.test/x"])
def test_a_reference_to_nothing_is_refused_where_the_step_is_defined(
    place: str, reference: str
) -> None:
    inner = {"$ref": reference}
    places: dict[str, dict[str, Any]] = {
        "whole": inner,
        "property": {"properties": {"a": inner}},
        "items": {"items": {"anyOf": [{"type": "null"}, inner]}},
        "definition": {"$defs": {"a": inner}},
    }
    schema = places[place]
    hive, said = Hive("never-made"), re.escape(f"it has no {reference!r}")
    with pytest.raises(ConfigurationError, match=rf"returns.*{said}"):

        @hive.step(returns=schema)
        async def work() -> None: ...

    with pytest.raises(ConfigurationError, match=said):
        PersonaExecutor(quick_config()).options(returns=schema)
