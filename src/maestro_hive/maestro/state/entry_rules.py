"""What an entry of each kind has: the facts that readers rely on, their types and ranges.

A copy of a run comes from a file, whose checksum says only that it is as it was written. So each of
its entries is checked here before it gets into a journal: what folds, shows and resumes a run reads
facts without asking. Facts of other names are allowed, as a newer version may add some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.strict_json import MAX_DEPTH, AtPathError, Json, member
from maestro_hive.maestro.state.strict_json import check as check_tree

#: Raises ``AtPathError`` for what is wrong.
Check = Callable[[Json], None]

#: Numbers of steps, attempts and entries, and fencing numbers.
_MOST = 1 << 53
#: The last microsecond of the year 9999, which is the last that can be shown.
_LAST_MOMENT = 253_402_300_799_999_999
_DIGITS = re.compile(r"[0-9a-f]{64}")


# --- values -----------------------------------------------------------------------------------------


def _wrong(value: Json, expected: str) -> AtPathError:
    shown = str(value)[:40] if isinstance(value, str | float | bool) else type(value).__name__
    return AtPathError(f"is {shown!r}, and must be {expected}")


def text(value: Json) -> None:
    """Accept a text."""
    if not isinstance(value, str):
        raise _wrong(value, "a text")


def flag(value: Json) -> None:
    """Accept true and false."""
    if type(value) is not bool:
        raise _wrong(value, "true or false")


def whole(least: int = 0, most: int = _MOST) -> Check:
    """Accept a whole number in a range."""

    def check(value: Json) -> None:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(value, f"a whole number from {least} to {most}")

    return check


def number(value: Json) -> None:
    """Accept a number that can be computed with."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, int) and abs(value) > _MOST << 10):
        raise _wrong(value, "a number that can be computed with")


def digest(value: Json) -> None:
    """Accept the digits of a SHA-256."""
    if type(value) is not str or not _DIGITS.fullmatch(value):
        raise _wrong(value, "64 hexadecimal digits")


def time(value: Json) -> None:
    """Accept a time with its zone, as ISO 8601."""
    text(value)
    try:
        known = datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        known = False
    if not known:
        raise _wrong(value, "a time with its zone, as ISO 8601")


def anything(_: Json) -> None:
    """Accept everything."""


moment = whole(0, _LAST_MOMENT)
count = whole()


def one_of(*known: str) -> Check:
    """Accept one of some texts."""

    def check(value: Json) -> None:
        if type(value) is not str or value not in known:
            raise _wrong(value, f"one of {', '.join(known)}")

    return check


def some(check: Check) -> Check:
    """Accept null as well."""
    return lambda value: None if value is None else check(value)


def either(*checks: Check) -> Check:
    """Accept what one of these accepts; the last one says what is wrong."""

    def check(value: Json) -> None:
        for each in checks[:-1]:
            try:
                return each(value)
            except AtPathError:
                continue
        return checks[-1](value)

    return check


def items(check: Check) -> Check:
    """Accept a list of these."""

    def check_all(value: Json) -> None:
        if not isinstance(value, list):
            raise _wrong(value, "a list")
        for at, each in enumerate(value):
            _inside(check, each, f"[{at}]")

    return check_all


def by_name(check: Check) -> Check:
    """Accept an object whose members are all of these."""

    def check_all(value: Json) -> None:
        for name, each in _object(value).items():
            _inside(check, each, member(name))

    return check_all


def members(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Accept an object with these members; others are not looked at."""
    known = {**required, **(optional or {})}

    def check_all(value: Json) -> None:
        found = _object(value)
        for name in required:
            if name not in found:
                raise AtPathError(f"has no {name!r}")
        for name, check in known.items():
            if name in found:
                _inside(check, found[name], member(name))

    return check_all


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise _wrong(value, "an object")
    return value


def _inside(check: Check, value: Json, step: str) -> None:
    try:
        check(value)
    except AtPathError as error:
        error.steps.append(step)
        raise


# --- parts of facts ---------------------------------------------------------------------------------

#: As ``ExecutionStatus`` has them; a test compares.
STATUSES = (
    *("pending", "running", "success", "failed", "retrying", "recovered", "help_needed"),
    *("bankrupt", "interrupted", "cancelled"),
)
_OVER = one_of("success", "failed", "cancelled")

_WAIT_MEMBERS: dict[str, Check] = {
    "seconds": number,
    "boot": text,
    "boot_seconds": number,
    "at": moment,
}
_WAIT = members(_WAIT_MEMBERS)


def _exception(value: Json) -> None:
    """Accept an exception as ``recorded_errors`` writes it."""
    _EXCEPTION(value)


def _item(value: Json) -> None:
    """Accept an argument or an attribute of an exception."""
    either(text, members({"error": _exception}), members({"text": text}))(value)


def _pair(value: Json) -> None:
    if type(value) is not list or len(value) != 2:
        raise _wrong(value, "a name and a value")
    _inside(text, value[0], "[0]")
    _inside(_item, value[1], "[1]")


_EXCEPTION = members(
    {"class": text, "message": text},
    {
        **dict.fromkeys(("stand_in", "value", "group", "failure"), text),
        **dict.fromkeys(("cause", "context"), _exception),
        **dict.fromkeys(("fields", "attributes"), items(_pair)),
        "args": items(_item),
        "notes": items(text),
        "parts": items(_exception),
    },
)
_ERROR = members(
    {},
    {
        **dict.fromkeys(("type", "message", "category", "traceback"), some(text)),
        "exception": some(_exception),
    },
)
_ATTEMPT = members(
    {"attempt_id": text, "attempt_number": count, "started_at": time, "status": one_of(*STATUSES)},
    {"ended_at": some(time), "tokens_used": number, "metrics": by_name(anything)},
)


def _report(attempt: Check) -> Check:
    """Accept a failure report, with what it has of each attempt."""
    return members(
        {
            **dict.fromkeys(("failed_persona", "error_category", "details"), text),
            "context": items(attempt),
            "suggested_fix": some(text),
        },
        {"attempt_number": number, "recoverable": flag},
    )


def _shape(value: Json) -> None:
    """Accept the shape of an answer, as ``answer_types`` writes it."""
    if _object(value):
        form = next((name for name in ("anyOf", "enum") if name in value), "type")
        members({form: _SHAPES[form]}, _SHAPES)(value)


_KIND = one_of("boolean", "integer", "number", "string", "null", "array", "object")
_SHAPES: dict[str, Check] = {
    "anyOf": items(_shape),
    "enum": items(anything),
    "values": items(anything),
    "type": _KIND,
    "items": _shape,
    "properties": by_name(_shape),
    "additionalProperties": either(flag, _shape),
    "required": items(text),
    **dict.fromkeys(("format", "class"), text),
    "kind": one_of("enum", "dataclass", "model"),
}
#: The shape of what a function declares; of a type that is not written as text, its name.
_DECLARED = either(members({"unknown": text}), _shape)

# --- values of entries --------------------------------------------------------------------------------

_ANY_OBJECT = by_name(anything)
_CALL = members({"args": items(anything), "kwargs": _ANY_OBJECT})
_FIELDS = members(
    {},
    {
        "persona_states": by_name(_ANY_OBJECT),
        "retry_counts": by_name(number),
    },
)


# --- one rule per kind --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an entry of a kind has; ``value`` checks the decoded value, where it matters."""

    required: Mapping[str, Check] = field(default_factory=dict)
    optional: Mapping[str, Check] = field(default_factory=dict)
    #: Facts that another fact requires: by its name.
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Of an attempt: its step and its number are counted from 1.
    of_attempt: bool = False
    needs_identity: bool = False
    value: Check | None = None


_NAMED: dict[str, Check] = {"name": text}
_PERSONA: dict[str, Check] = {"persona": text}
_CHILD: dict[str, Check] = {"run_id": text, "workflow": text}

RULES: dict[EntryKind, Rule] = {
    EntryKind.ATTEMPT_STARTED: Rule(
        optional={
            **_NAMED,
            **_PERSONA,
            "options": some(_ANY_OBJECT),
            "defaults": some(by_name(text)),
            "occurrence": count,
            "returns": some(_DECLARED),
            "reserved": some(_ANY_OBJECT),
        },
        also={"defaults": ("name", "persona")},
        of_attempt=True,
    ),
    EntryKind.ATTEMPT_FAILED: Rule(
        required={"error": _ERROR},
        optional={
            "status": one_of(*STATUSES),
            "round": count,
            "wait": _WAIT,
            "clock": members({**_WAIT_MEMBERS, "elapsed": number}),
            **dict.fromkeys(("reason", "healing_error", "feedback"), some(text)),
            "healing": some(by_name(text)),
            "diagnosis": members({"fingerprint": text, "type": text}),
            "still_held": items(members({"lease": text, "fence": count, "holder": text})),
        },
        of_attempt=True,
        value=_ANY_OBJECT,
    ),
    EntryKind.STEP_COMPLETED: Rule(optional={"by": some(text)}),
    EntryKind.PROGRESS_SAVED: Rule(value=_ANY_OBJECT),
    EntryKind.MEMORY_SAVED: Rule(optional=_PERSONA, value=_ANY_OBJECT),
    EntryKind.HISTORY_APPENDED: Rule(optional=_PERSONA),
    EntryKind.SPENT: Rule(
        optional={
            **_PERSONA,
            **dict.fromkeys(("tokens", "usd"), number),
            "model": text,
            **dict.fromkeys(("input", "output", "cached", "cache_write"), count),
        }
    ),
    EntryKind.ROUND_FAILED: Rule(
        required={
            **dict.fromkeys(("name", "persona", "execution_id"), text),
            "round": count,
            "status": one_of(*STATUSES),
            "seconds": number,
            "tokens": number,
            "report": _report(_ATTEMPT),
            "wait": some(_WAIT),
        },
        needs_identity=True,
    ),
    EntryKind.ESCALATED: Rule(
        required={"report": _report(anything), "actions": items(text), "ticket": some(text)},
        optional={"outer": count, "trouble": text, "escalation": text},
        needs_identity=True,
    ),
    EntryKind.ESCALATION_DELIVERED: Rule(
        required={**_NAMED, "escalation": text, "system": text},
        optional=dict.fromkeys(("ticket", "address", "comment"), some(text)),
        needs_identity=True,
    ),
    EntryKind.FIELDS_SET: Rule(value=some(_FIELDS)),
    EntryKind.TASK_PENDING: Rule(required={"task": text}),
    EntryKind.TASK_COMPLETED: Rule(required={"task": text}, value=some(_ANY_OBJECT)),
    EntryKind.RETRY_COUNTED: Rule(required=_PERSONA),
    EntryKind.PERSONA_SET: Rule(required=_PERSONA, value=some(_ANY_OBJECT)),
    EntryKind.RESTORED: Rule(optional={"from": text, "saved_at": text, "fence": count}),
    EntryKind.RETRIED: Rule(
        optional={
            "only": items(digest),
            **dict.fromkeys(("by", "feedback", "escalation"), some(text)),
        }
    ),
    EntryKind.RUN_STARTED: Rule(
        required={"workflow": text},
        optional={
            "parameters": items(text),
            "types": by_name(_DECLARED),
            **dict.fromkeys(("parent", "forked_from"), some(text)),
            "from_step": some(either(count, text)),
            "enqueued_in": items(members({"run": text, "step": count})),
        },
        needs_identity=True,
        value=_CALL,
    ),
    EntryKind.RUN_ENDED: Rule(
        required={"status": _OVER},
        optional={"error": _ERROR, "reason": some(text), "failed": items(digest)},
    ),
    EntryKind.WAIT_STARTED: Rule(
        required={**_NAMED, "what": one_of("sleep", "answer", "timeout", "escalation")},
        optional={
            "wait": _WAIT,
            "shape": _shape,
            "returns": _shape,
            "escalation": text,
            "step": digest,
        },
        needs_identity=True,
    ),
    EntryKind.WAIT_ENDED: Rule(
        required={
            **_NAMED,
            "how": one_of("over", "answered", "timeout", "cancelled", "withdrawn"),
        },
        optional=dict.fromkeys(("answer", "by"), some(text)),
        needs_identity=True,
    ),
    EntryKind.CHILD_STARTED: Rule(required=_CHILD, needs_identity=True),
    EntryKind.CHILD_ENDED: Rule(required={**_CHILD, "status": _OVER}, needs_identity=True),
    EntryKind.STEP_FAILED: Rule(
        required=_NAMED,
        optional={"error": _ERROR, "rounds": count, "ticket": some(text)},
        needs_identity=True,
    ),
    EntryKind.STEP_CANCELLED: Rule(required=_NAMED, needs_identity=True),
    EntryKind.VALUE_RECORDED: Rule(required=_NAMED, needs_identity=True),
    EntryKind.CANCEL_REQUESTED: Rule(required={"wait": _WAIT}, optional={"reason": some(text)}),
    EntryKind.REPLAY_DIFFERED: Rule(optional=dict.fromkeys(("missing", "new"), items(text))),
    EntryKind.ARGUMENTS_ADDED: Rule(required={**_NAMED, **_PERSONA, "defaults": by_name(text)}),
    EntryKind.RUN_SUSPENDED: Rule(required={"error": _ERROR}, optional={"account": text}),
    EntryKind.REPAIR_TRIED: Rule(
        required={"status": text, "fingerprint": text},
        optional={
            **dict.fromkeys(
                ("type", "healer", "fix", "feedback", "error", "workspace"), some(text)
            ),
            "wait": _WAIT,
            "files": items(text),
        },
        of_attempt=True,
        value=_ANY_OBJECT,
    ),
    EntryKind.REPAIR_JUDGED: Rule(
        required={
            "verdict": one_of("worked", "failed", "undecided", "interrupted"),
            "fingerprint": text,
            "healer": text,
        },
        optional={"reason": some(text), **dict.fromkeys(("restored", "left"), items(text))},
        of_attempt=True,
    ),
    EntryKind.RUN_RESUMED: Rule(optional=dict.fromkeys(("saved_tokens", "saved_usd"), number)),
    EntryKind.BUDGET_WARNED: Rule(
        required={
            **dict.fromkeys(("account", "unit"), text),
            **dict.fromkeys(("percent", "used", "limit"), count),
        }
    ),
}

_ENTRY = members(
    {
        "kind": text,
        "seq": whole(1),
        "at": moment,
        "step": count,
        "attempt": count,
        "facts": some(lambda value: check_tree(_object(value), MAX_DEPTH)),
        "identity": some(digest),
        "sha256": some(digest),
    }
)
_KINDS = {kind.name.lower(): kind for kind in EntryKind}


def check_entry(entry: Json, *, after: int = 0) -> EntryKind:
    """Return the kind of an entry of a document; raise ``AtPathError`` if readers cannot rely on it.

    ``after`` is the number of the entry before it.
    """
    _ENTRY(entry)
    if entry["seq"] <= after:
        raise AtPathError(f"has the number {entry['seq']}, and follows {after}")
    kind = _KINDS.get(entry["kind"])
    if kind is None or kind is EntryKind.RESTORED:  # what came before is not part of a copy
        error = _wrong(entry["kind"], "a kind of entry that this version knows")
        error.steps.append(".kind")
        raise error
    rule = RULES[kind]
    if rule.needs_identity and entry["identity"] is None:
        raise AtPathError(f"has no identity, which a {entry['kind']} needs")
    if rule.of_attempt:
        for name in ("step", "attempt"):
            _inside(whole(1), entry[name], member(name))
    facts = entry["facts"] or {}
    _inside(members(rule.required, rule.optional), facts, ".facts")
    _check_together(kind, rule, facts)
    return kind


def _check_together(kind: EntryKind, rule: Rule, facts: dict[str, Json]) -> None:
    """Check the facts that are required by other ones."""
    for name, others in rule.also.items():
        if facts.get(name):
            _inside(members(dict.fromkeys(others, anything)), facts, ".facts")
    if kind is EntryKind.WAIT_STARTED and facts["what"] in ("sleep", "timeout"):
        _inside(members({"wait": anything}), facts, ".facts")
    if kind is EntryKind.STEP_FAILED and not facts.get("skipped"):
        _inside(members({"error": anything}), facts, ".facts")


def check_value(kind: EntryKind, value: object) -> None:
    """Raise ``AtPathError`` if the decoded value of an entry is not what readers rely on."""
    check = RULES[kind].value
    if check is not None:
        _inside(check, value, ".value")
