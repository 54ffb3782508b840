"""Exceptions as plain JSON, and made again: what a workflow sees is what was read back.

``error_tree`` records an exception: its class by name, its arguments, its attributes, notes, causes
and, of a group, its parts. ``make_error`` makes the same exception of it, without calling its
constructor, if its class is imported in this process; otherwise a ``RecordedError`` stands for it.
The life that records an error raises it read back as well, so that no later life sees another one.

Values are stored as texts of the codec: the facts around them are written with their keys sorted,
and the order of what is in an error must not depend on that.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine.errors import text_of, writable
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.redaction import cut, cut_start, redact_text
from maestro_hive.maestro.state import codec, codec_classes, codec_large
from maestro_hive.maestro.state.strict_json import AtPathError, Json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime
    from types import FrameType

    from maestro_hive.engine.results import ExecutionAttempt, ExecutionStatus

Node = dict[str, Json]

#: A tree is not larger than this, as JSON.
MAX_BYTES = 64 * 1024
#: A value that takes more is left out.
_VALUE_BYTES = 16 * 1024
#: How many errors deep causes, parts and attributes are recorded.
_MAX_DEPTH = 10
#: How many of the last frames are recorded.
_FRAMES = 20
_NAME_LENGTH = 300
#: Whose frames are no lines of the user's.
_HIDDEN = ("maestro_hive", "asyncio")
#: Where the failure of a step is attached to its error.
_FAILURE = "__maestro_failure__"
#: Fields of these classes are recorded in another way.
_NO_FIELDS_OF = frozenset({BaseExceptionGroup, BaseException, object})
_NO_FIELDS = frozenset({"__dict__", "__weakref__"})
_ATTRIBUTES: Any = vars(BaseException)["__dict__"]
_LINES = "Recorded traceback (most recent call last):\n"
_MESSAGE = "Recorded message: "


class _Limits(NamedTuple):
    """How much of an error is recorded."""

    attributes: bool
    #: Arguments and fields as they are; otherwise the texts of arguments.
    arguments: bool
    causes: bool
    #: How many errors in all, and how many arguments and notes of each.
    errors: int
    args: int
    notes: int
    #: How many characters of a text, and of a note.
    text: int
    note: int


#: The first that gives a tree of the allowed size is used.
_LIMITS = (
    _Limits(True, True, True, errors=50, args=1_000, notes=8, text=2_000, note=3_000),
    _Limits(False, True, True, errors=50, args=1_000, notes=8, text=2_000, note=3_000),
    _Limits(False, False, True, errors=50, args=8, notes=8, text=500, note=1_000),
    _Limits(False, False, False, errors=8, args=3, notes=2, text=200, note=500),
    _Limits(False, False, False, errors=1, args=1, notes=1, text=200, note=500),
)


class RecordedError(MaestroError):
    """Stands for an error that cannot be made again; ``reason`` says why.

    ``type_name`` is the class of the error, ``message`` its text. It has the notes and the causes
    of the error. It is raised before a restart too, so that a workflow sees the same error.
    """

    def __init__(self, type_name: str, message: str, reason: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message
        self.reason = reason


class _CannotMakeError(Exception):
    """An error cannot be made; its text is the reason."""


# --- recording ------------------------------------------------------------------------------------


def error_tree(error: BaseException) -> Node:
    """Return an exception as plain JSON of a bounded size, of which ``make_error`` makes it again.

    What is too large is left out in a fixed order: large values, attributes, arguments, causes.
    """
    tree: Node = {}
    for limits in _LIMITS:
        recorder = _Recorder(limits)
        tree = recorder.node(error, ())
        if recorder.bytes_left >= 0 and len(codec.dump(tree)) <= MAX_BYTES:
            break
    return tree


class _Recorder:
    """Makes the tree of one error, within limits."""

    def __init__(self, limits: _Limits) -> None:
        self._limits = limits
        self._left = limits.errors
        #: When values have used them up, the tree is too large, and no more are encoded for it.
        self.bytes_left = MAX_BYTES

    def node(self, error: BaseException, around: tuple[int, ...]) -> Node:
        """Return the tree of an error; ``around`` are those that it is a part or a cause of."""
        self._left -= 1
        around = (*around, id(error))
        name, message = _class_text(type(error)), self._text(error)
        node: Node = {"class": name, "message": message}
        added = self._own_lines(error)
        try:
            node |= self._content(error, around)
            if self._text(_bare_error(node)) != message:
                added.append(_MESSAGE + message)
        except Exception as problem:  # noqa: BLE001 - a class of the user's may raise anything
            reason = cut(_reason(problem), self._limits.text)
            node = {"class": name, "message": message, "stand_in": reason}
            added.append(f"This stands for {_shown_class(name)}: {reason}")
        notes = self._notes(error, added)
        if notes:
            node["notes"] = notes
        return node | self._causes(error, around)

    def _text(self, value: object) -> str:
        return cut(text_of(value), self._limits.text)

    # --- what it is made of ---

    def _content(self, error: BaseException, around: tuple[int, ...]) -> Node:
        if not isinstance(error, Exception):
            raise _CannotMakeError("only an Exception is raised again")
        value = self._by_codec(error)
        if value is not None:
            return {"value": value}
        codec_classes.stored_name(type(error))  # raises an error if it would not be found again
        content: Node = {}
        if isinstance(error, ExceptionGroup):
            content["group"] = self._text(error.message)
            content["parts"] = self._parts(error, around)
        else:
            _new(type(error))  # raises an error if it cannot be made
            given: tuple[object, ...] = error.args
            content["args"] = [self._argument(each, around) for each in given[: self._limits.args]]
        return content | self._more(error, around)

    def _more(self, error: Exception, around: tuple[int, ...]) -> Node:
        """Return the fields and the attributes of an error, and the failure attached to it."""
        more: Node = {}
        if self._limits.arguments:
            more["fields"] = self._named(_fields(error), around)
        if self._limits.attributes:
            more["attributes"] = self._named(_attributes(error), around)
            failure = failure_of(error)
            more["failure"] = None if failure is None else _encoded(failure)
        return {name: item for name, item in more.items() if item}

    def _by_codec(self, error: Exception) -> str | None:
        """Return the error as its registered codec encodes it, if there is one that works."""
        if not self._limits.arguments or not _has_codec(error):
            return None
        text = _encoded(error)
        return text if text and isinstance(codec.decode(text.encode()), Exception) else None

    def _parts(self, group: ExceptionGroup[Exception], around: tuple[int, ...]) -> list[Node]:
        """Return the trees of a group's errors; what is left out has a stand-in, as the last."""
        if len(around) >= _MAX_DEPTH:
            raise _CannotMakeError("it stands too deep in other errors")
        nodes: list[Node] = []
        for part in group.exceptions:
            more = len(group.exceptions) - len(nodes)
            if self._left <= 1 < more:
                self._left -= 1
                message = f"{more} more errors, which were not recorded"
                why = f"of an error and what belongs to it, {self._limits.errors} are recorded"
                nodes.append({"class": "builtins:Exception", "message": message, "stand_in": why})
                break
            nodes.append(self.node(part, around))
        return nodes

    def _argument(self, value: object, around: tuple[int, ...]) -> Json:
        item = self._value(value, around) if self._limits.arguments else None
        return {"text": self._text(value)} if item is None else item

    def _named(
        self, values: Iterable[tuple[str, object]], around: tuple[int, ...]
    ) -> list[list[Json]]:
        """Return names and values as pairs, which have an order; not what cannot be encoded."""
        items = ((name, self._value(value, around)) for name, value in values)
        return [[name, item] for name, item in items if item is not None and _is_text(name)]

    def _value(self, value: object, around: tuple[int, ...]) -> Json:
        """Return a value as it is recorded, or None."""
        if self.bytes_left < 0:
            return None
        if not isinstance(value, BaseException) or _has_codec(value):
            text = _encoded(value)
            self.bytes_left -= len(text or "")
            return text
        return {"error": self.node(value, around)} if self._has_room(value, around) else None

    def _has_room(self, error: BaseException, around: tuple[int, ...]) -> bool:
        return self._left > 0 and len(around) < _MAX_DEPTH and id(error) not in around

    # --- what belongs to it ---

    def _causes(self, error: BaseException, around: tuple[int, ...]) -> Node:
        if not self._limits.causes:
            return {}
        cause, context = error.__cause__, error.__context__
        if cause is not None:
            return {"cause": self.node(cause, around)} if self._has_room(cause, around) else {}
        if error.__suppress_context__:
            return {"suppressed": True}
        if context is not None and self._has_room(context, around):
            return {"context": self.node(context, around)}
        return {}

    def _own_lines(self, error: BaseException) -> list[str]:
        """Return the lines of the user's in a traceback, as a note."""
        frames = [each for each in traceback.walk_tb(error.__traceback__) if not is_hidden(each[0])]
        if not frames:
            return []
        try:
            lines = traceback.StackSummary.extract(iter(frames[-_FRAMES:])).format()
        except Exception:  # noqa: BLE001 - a source that cannot be read is no reason to fail
            return []
        room = self._limits.note - len(_LINES)
        return [_LINES + cut_start(writable("".join(lines).rstrip()), room)]

    def _notes(self, error: BaseException, added: list[str]) -> list[str]:
        given = _attributes_of(error).get("__notes__")
        texts = [each for each in given if isinstance(each, str)] if type(given) is list else []
        count = max(0, self._limits.notes - len(added))
        notes = [*texts[:count], *added[-self._limits.notes :]]
        return [cut(writable(each), self._limits.note) for each in notes]


def _encoded(value: object) -> str | None:
    """Return the text of a value that comes back from it; None if there is none, or a long one."""
    try:
        if codec_large.is_large(value):
            return None
        data = codec.encode(value).data
        if len(data) > _VALUE_BYTES:
            return None
        codec.decode(data)
    except Exception:  # noqa: BLE001 - codecs and constructors of the user's may raise anything
        return None
    return data.decode()


def _has_codec(error: BaseException) -> bool:
    return codec_classes.codecs.of_type(type(error), load=True) is not None


def _is_text(name: str) -> bool:
    return name == writable(name) and len(name) <= _NAME_LENGTH


def _attributes_of(error: BaseException) -> dict[str, Any]:
    """Return the dictionary of an error, whatever its class says about attributes."""
    found: dict[str, Any] = _ATTRIBUTES.__get__(error)
    return found


def _attributes(error: BaseException) -> Iterator[tuple[str, object]]:
    for name, value in list(_attributes_of(error).items()):
        if name not in ("__notes__", _FAILURE):
            yield name, value


def _fields(error: BaseException) -> Iterator[tuple[str, object]]:
    """Yield what is not in an error's dictionary: slots, and the fields of classes written in C."""
    seen = set(_NO_FIELDS)
    for kind in type(error).__mro__:
        if kind in _NO_FIELDS_OF:
            continue
        if kind is AttributeError:
            seen.add("obj")  # the whole object that lacks the attribute: no business of a journal
        for name, each in vars(kind).items():
            if isinstance(each, MemberDescriptorType | GetSetDescriptorType) and name not in seen:
                seen.add(name)
                try:
                    value = each.__get__(error)
                except Exception:  # noqa: BLE001, S112 - it is not set
                    continue
                # A field of C that is not set is read as None, and would print if it were set.
                if value is not None or "__slots__" in vars(kind):
                    yield name, value


# --- making ---------------------------------------------------------------------------------------


def make_error(tree: Mapping[str, Json]) -> Exception:
    """Return the error that a tree describes, or the stand-in for it; its constructor is not called.

    Its class must be one of ``Exception`` that is imported already: nothing is imported by name.
    """
    try:
        error = _bare_error(tree)
    except Exception as problem:  # noqa: BLE001 - a class of the user's may raise anything
        error = RecordedError(_shown_class(tree["class"]), tree["message"], _reason(problem))
    notes = tree.get("notes")
    if notes:
        _attributes_of(error)["__notes__"] = list(notes)
    for name, member in (("__cause__", "cause"), ("__context__", "context")):
        if member in tree:
            _set(error, name, make_error(tree[member]))
    if tree.get("suppressed"):
        _set(error, "__suppress_context__", True)
    if "failure" in tree:
        failure = _read("failure", tree["failure"])
        if isinstance(failure, StepFailure):
            attach_failure(error, failure)
    return error


def error_from(facts: Mapping[str, Json]) -> Exception:
    """Return the error that was recorded as these facts (``failures.error_facts``)."""
    tree = facts.get("exception")
    if tree is not None:
        return make_error(tree)
    error = RecordedError(
        str(facts.get("type", "Exception")),
        str(facts.get("message", "")),
        "it was recorded as a text alone",
    )
    if facts.get("traceback"):
        error.add_note(redact_text(str(facts["traceback"])))
    return error


def _bare_error(node: Mapping[str, Json]) -> Exception:
    """Return the error without its notes and causes, or raise an error that says why there is none."""
    if "stand_in" in node:
        return RecordedError(_shown_class(node["class"]), node["message"], node["stand_in"])
    if "value" in node:
        made = codec.decode(node["value"].encode())
        if not isinstance(made, Exception):
            raise _CannotMakeError("its codec makes something else of it")
        return made
    kind = codec_classes.known_class(node["class"])
    if not issubclass(kind, Exception):
        raise _CannotMakeError("its name is now that of something else than an Exception")
    if "parts" in node:
        made = _new(kind, node["group"], [make_error(part) for part in node["parts"]])
    else:
        made = _new(kind)
    fields = _read_all(node.get("fields", ()))
    _set_unicode_fields(made, fields)
    if "args" in node:
        _set(made, "args", tuple(_read_argument(item) for item in node["args"]))
    for name, value in fields.items():
        try:
            _set(made, name, value)
        except (AttributeError, TypeError):
            continue  # it cannot be set, or no longer
    _attributes_of(made).update(_read_all(node.get("attributes", ())))
    return made


def _new(kind: type[Exception], *args: object) -> Exception:
    """Return an instance, made by the class written in C that it is based on."""
    base: Any = kind
    while not isinstance(vars(base).get("__new__"), BuiltinFunctionType):
        base = base.__base__
    try:
        made = base.__new__(kind, *args)
    except Exception as error:
        raise _CannotMakeError(
            f"its class cannot be made without its constructor ({text_of(error)});"
            f" maestro_hive.register_codec({kind.__qualname__}, encode, decode) can say how it is"
        ) from error
    assert isinstance(made, kind)
    return made


#: The text of these reads the memory of its fields, so they are set by what checks their types.
_UNICODE_FIELDS: dict[type[UnicodeError], tuple[str, ...]] = {
    UnicodeDecodeError: ("encoding", "object", "start", "end", "reason"),
    UnicodeEncodeError: ("encoding", "object", "start", "end", "reason"),
    UnicodeTranslateError: ("object", "start", "end", "reason"),
}


def _set_unicode_fields(error: Exception, fields: dict[str, Any]) -> None:
    """Set the fields of a UnicodeError, all or none, and remove them from ``fields``."""
    for kind, names in _UNICODE_FIELDS.items():
        if isinstance(error, kind):
            values = [fields.pop(name, None) for name in names]
            with suppress(TypeError):
                kind.__init__(error, *values)


def _set(error: Exception, name: str, value: object) -> None:
    """Set an attribute, whatever the class of the error says about that."""
    BaseException.__setattr__(error, name, value)


def _read_all(items: Iterable[tuple[str, Json]]) -> dict[str, Any]:
    """Return values by name; not those of classes that are gone."""
    values = {name: _read(name, item) for name, item in items}
    return {name: value for name, value in values.items() if value is not _GONE}


_GONE: Any = object()


def _read(name: str, item: Json) -> Any:
    if isinstance(item, str):
        try:
            return codec.decode(item.encode(), name)
        except MaestroError:
            return _GONE
    return make_error(item["error"]) if "error" in item else item["text"]


def _read_argument(item: Json) -> Any:
    value = _read("args", item)
    return item if value is _GONE else value


# --- names, reasons and lines ---------------------------------------------------------------------


def _class_text(kind: type) -> str:
    return writable(codec_classes.class_name(kind))[:_NAME_LENGTH]


def _shown_class(name: str) -> str:
    """Return the name of a class as tracebacks show it."""
    return name.removeprefix("builtins:").replace(":", ".", 1)


def _reason(problem: Exception) -> str:
    if isinstance(problem, AtPathError):
        return problem.reason
    if isinstance(problem, _CannotMakeError | MaestroError):
        return text_of(problem)
    return f"making it again raised {type(problem).__name__}: {text_of(problem)}"


def is_hidden(frame: FrameType) -> bool:
    """Return whether a frame is none of the user's."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _HIDDEN


# --- the failure of a step ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """One attempt of a step that failed for good; without an error if its process died."""

    number: int
    status: ExecutionStatus
    started_at: datetime
    ended_at: datetime | None
    error_type: str | None
    message: str | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailure:
    """What is known of a step that failed for good; ``ticket`` is the one made for it, if any."""

    step: str
    persona: str
    attempts: tuple[FailedAttempt, ...]
    rounds: int = 1
    ticket: str | None = None
    #: What tells it from the other steps of its run.
    identity: str = ""


def failure_of(error: BaseException) -> StepFailure | None:
    """Return the attempts of the step that raised this error for good; None for other errors."""
    found = _attributes_of(error).get(_FAILURE)
    return found if isinstance(found, StepFailure) else None


def attach_failure(error: BaseException, failure: StepFailure) -> None:
    """Make ``failure_of`` return this failure for an error."""
    _attributes_of(error)[_FAILURE] = failure


def failed_attempts(attempts: Iterable[ExecutionAttempt]) -> tuple[FailedAttempt, ...]:
    """Return the attempts of a step as its failure has them."""
    return tuple(
        FailedAttempt(
            number=each.attempt_number,
            status=each.status,
            started_at=each.started_at,
            ended_at=each.ended_at,
            error_type=each.error_type,
            message=each.error_message,
            tokens=each.tokens_used,
        )
        for each in attempts
        if each.started_at is not None
    )
