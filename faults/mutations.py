"""Structural mutations of a run's document: valid JSON with a valid SHA-256, and a hostile content."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

from faults.hostile_texts import with_digest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    Run = dict[str, Any]
    Place = tuple[Any, Any]  # a container, and a key or an index in it

#: Texts that no JSON library writes: they replace a placeholder.
_LITERALS = (
    "NaN",
    "-Infinity",
    "1e999",
    "-0",
    "1E400",
    "0.1e-999999",
    '"\\ud800"',
    "01",
    "9" * 5000,
    "[" * 2000 + "]" * 2000,
)
_NUMBERS = (
    -1,
    0,
    1,
    2**31,
    2**53 + 1,
    2**60,
    2**62,
    2**63,
    -(2**63),
    10**30,
    10**300,
    0.5,
    -1.5,
    1e308,
)
_STRINGS = (
    "",
    " ",
    "\0",
    "\n",
    "../../escaped",
    "/etc/passwd",
    "\x1b[31mred\x1b[0m",
    "\u202egnp.exe",
    "x" * 5000,
    "🐝" * 300,
    "$",
    "[bold red]markup[/]",
    "{0.__class__}",
    "%s%n%d",
    "9" * 30,
    "2030-01-01T00:00:00+00:00",
    "9999-99-99T99:99:99",
    "zz",
    "00" * 32,
)
_OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"$": "tuple"},
    [1, "a", {}],
)
#: The tags of values: some of these contents they cannot have.
_TAGS = (
    *("tuple", "set", "bytes", "datetime", "enum", "dataclass", "exception", "pairs", "float"),
    *("decimal", "path", "ndarray", "pydantic", "range", "unknown", "type", "deque", "complex"),
)


def mutant(good: Run, member: str, rng: random.Random) -> bytes:
    """Return the text of a document, whose run is under ``member``, with one to three changes."""
    document = copy.deepcopy(good)
    run = document[member]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _one_change(document, run, rng)
    return seal(document, rng)


def seal(document: Any, rng: random.Random) -> bytes:
    """Return the text of a document with its SHA-256; placeholders become what is not JSON."""
    text = json.dumps(document, separators=(",", ":"))
    while _PLACEHOLDER in text:
        text = text.replace(_PLACEHOLDER, rng.choice(_LITERALS), 1)
    return with_digest(text.encode())


_PLACEHOLDER = '"@literal@"'


def _one_change(document: Any, run: Run, rng: random.Random) -> None:
    entries = run.get("entries")
    if not isinstance(entries, list) or not entries or rng.random() < 0.12:
        _change_at(rng.choice(list(_places(document, depth=3))), rng)
        return
    change = rng.choices(_CHANGES, _WEIGHTS)[0]
    change(run, entries, rng)


# --- one place ------------------------------------------------------------------------------------


def _places(tree: Any, depth: int = 100) -> Iterator[Place]:
    """Yield every member and item below a tree."""
    if isinstance(tree, dict | list) and depth:
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key], depth - 1)


def _change_at(place: Place, rng: random.Random) -> None:
    container, key = place
    match rng.randrange(10):
        case 0 | 1:
            del container[key]
        case 2 if isinstance(container, dict):
            container[rng.choice(_STRINGS)] = container.pop(key)
        case 2:
            container.insert(key, copy.deepcopy(container[key]))
        case 3:
            container[key] = _nested(container[key], rng.choice((2, 90, 105, 340)), rng)
        case _:
            container[key] = odd_value(container[key], rng)


def odd_value(value: Any, rng: random.Random) -> Any:
    """Return something else: of the same type, or of another one."""
    chance = rng.random()
    if chance < 0.5:
        return _like(value, rng)
    if chance < 0.55:
        return "@literal@"
    if chance < 0.65:
        return {"$": rng.choice(_TAGS), "v": _like(value, rng)}
    return copy.deepcopy(rng.choice((*_NUMBERS, *_STRINGS, *_OTHERS)))


def _like(value: Any, rng: random.Random) -> Any:
    """Return something of the same type, or nearly so."""
    found: tuple[Any, ...]
    match value:
        case bool() | None:
            found = (not value, 0, "true")
        case int() | float():
            found = (*_NUMBERS, value + 1, -value, float(value % 10**15))
        case str():
            found = (*_STRINGS, value * 2, value[:-1], value.upper())
        case list():
            found = (value * 2, value[:-1], value[::-1], dict.fromkeys("ab", value))
        case _:
            found = ([value], {**value, "$": rng.choice(_TAGS)}, list(value))
    return copy.deepcopy(rng.choice(found))


def _nested(value: Any, depth: int, rng: random.Random) -> Any:
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


# --- entries ----------------------------------------------------------------------------------------


def _entry(entries: list[Any], rng: random.Random) -> dict[str, Any]:
    return rng.choice([each for each in entries if isinstance(each, dict)] or [{}])


def _drop(_: Run, entries: list[Any], rng: random.Random) -> None:
    del entries[rng.randrange(len(entries))]


def _duplicate(_: Run, entries: list[Any], rng: random.Random) -> None:
    entry = copy.deepcopy(rng.choice(entries))
    entries.insert(rng.randrange(len(entries) + 1), entry)


def _move(_: Run, entries: list[Any], rng: random.Random) -> None:
    entry = entries.pop(rng.randrange(len(entries)))
    entries.insert(rng.randrange(len(entries) + 1), entry)


def _reverse(_: Run, entries: list[Any], rng: random.Random) -> None:
    start = rng.randrange(len(entries))
    entries[start:] = reversed(entries[start:])


def _replace_entry(_: Run, entries: list[Any], rng: random.Random) -> None:
    entries[rng.randrange(len(entries))] = copy.deepcopy(rng.choice((*_OTHERS, *_NUMBERS, "x")))


def _change_member(_: Run, entries: list[Any], rng: random.Random) -> None:
    entry = _entry(entries, rng)
    if entry:
        _change_at((entry, rng.choice(list(entry))), rng)


def _change_kind(_: Run, entries: list[Any], rng: random.Random) -> None:
    kinds = [each["kind"] for each in entries if isinstance(each, dict) and "kind" in each]
    _entry(entries, rng)["kind"] = rng.choice((*kinds, *_KINDS))


_KINDS = (
    *("restored", "retried", "spent", "fields_set", "persona_set", "task_completed", "run_ended"),
    *("wait_started", "wait_ended", "cancel_requested", "escalated", "child_ended", "step_failed"),
    *("arguments_added", "replay_differed", "unknown_kind", "ATTEMPT_STARTED", "", "run_started"),
)


def _mix(_: Run, entries: list[Any], rng: random.Random) -> None:
    """Give an entry a member of another one: a step, an identity, facts, a value."""
    one, other = _entry(entries, rng), _entry(entries, rng)
    for name in rng.choice((("identity",), ("step",), ("facts",), ("sha256", "value"), ("at",))):
        if name in other:
            one[name] = copy.deepcopy(other[name])
        else:
            one.pop(name, None)


def _change_facts(_: Run, entries: list[Any], rng: random.Random) -> None:
    entry = _entry(entries, rng)
    facts = entry.get("facts")
    places = list(_places(facts))
    if places and rng.random() < 0.85:
        _change_at(rng.choice(places), rng)
    elif isinstance(facts, dict):
        facts[rng.choice(_FACTS)] = odd_value(None, rng)


_FACTS = (
    *("name", "persona", "options", "defaults", "occurrence", "status", "error", "reason", "round"),
    *(
        "clock",
        "counts",
        "final",
        "wait",
        "healed",
        "feedback",
        "tokens",
        "usd",
        "report",
        "ticket",
    ),
    *("task", "fence", "from", "only", "forget", "run", "workflow", "parameters", "parent", "what"),
    *("returns", "asked", "healing", "still_held", "resolved", "types", "copied"),
    *("how", "answer", "by", "run_id", "cancelled", "rounds", "skipped", "missing", "new", "shape"),
)


def _change_value(run: Run, entries: list[Any], rng: random.Random) -> None:
    """Change a value, with a digest that matches."""
    valued = [each for each in entries if isinstance(each, dict) and "value" in each]
    if not valued:
        _change_stored(run, entries, rng)
        return
    entry = rng.choice(valued)
    places = [(entry, "value"), *_places(entry["value"])]
    _change_at(rng.choice(places), rng)
    if "value" in entry:
        text = json.dumps(entry["value"], separators=(",", ":"), ensure_ascii=False)
        entry["sha256"] = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _change_stored(run: Run, _: list[Any], rng: random.Random) -> None:
    places = list(_places(run.get("values"), depth=4)) or list(_places(run, depth=1))
    if places:
        _change_at(rng.choice(places), rng)


_CHANGES: tuple[Callable[[Run, list[Any], random.Random], None], ...]
_CHANGES = (
    *(_drop, _duplicate, _move, _reverse, _replace_entry, _change_member, _change_kind, _mix),
    *(_change_facts, _change_value, _change_stored),
)
_WEIGHTS = (4, 4, 4, 1, 1, 12, 8, 10, 34, 18, 3)
