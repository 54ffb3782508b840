"""Exceptions as JSON, and made again: what a workflow sees is what was read back.

``encode_error`` records an exception: its class by name, its arguments, fields, attributes, notes,
causes and, of a group, its parts. ``decode_error`` makes the same exception of it, without calling
its constructor, if its class is imported in this process; otherwise a ``RecordedError`` stands for
it. The life that records an error raises it read back as well, so that no later life sees another.

One exception takes at most ``MAX_BYTES``. What does not fit is left out, and a note names it.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import datetime
from types import BuiltinFunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

import msgspec

from maestro_hive.journal import user_classes, values
from maestro_hive.journal.user_classes import AtPathError
from maestro_hive.kernel.errors import MaestroError, RecordedError
from maestro_hive.kernel.redaction import cut

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

Node = dict[str, Any]

#: The text of an exception is not longer.
MAX_BYTES = 1 << 20
#: How much large values leave to messages, notes and causes, and how much these exceed it at most.
_RESERVE = MAX_BYTES // 8
_LARGE = 32 * 1024
#: How much an error takes besides its texts and values, with the longest name.
_NODE_BYTES = 2_500
#: How many characters of a text are recorded, and of each when there is no more room.
_TEXT = 4_000
_SHORT_TEXT = 100
#: How many errors are recorded with one, and how many errors deep.
_MAX_ERRORS = 50
_MAX_DEPTH = 10
_MAX_ARGS = 1_000
_MAX_NOTES = 16
_MAX_FRAMES = 20
_NAME_LENGTH = 300
#: The packages whose lines are none of the user's.
_HIDDEN = ("maestro_hive", "asyncio")
#: The attribute that has the failure of a step.
_FAILURE = "__maestro_failure__"
_LINES = "Recorded traceback (most recent call last):\n"
_ATTRIBUTES: Any = vars(BaseException)["__dict__"]
#: The text of these reads the memory of their fields, so their constructors set them: they check.
_UNICODE_FIELDS: dict[type[UnicodeError], tuple[str, ...]] = {
    UnicodeDecodeError: ("encoding", "object", "start", "end", "reason"),
    UnicodeEncodeError: ("encoding", "object", "start", "end", "reason"),
    UnicodeTranslateError: ("object", "start", "end", "reason"),
}


# --- the failure of a step --------------------------------------------------------------------


class FailedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a step that failed for good; without an error if its process died."""

    number: int
    status: str
    started_at: datetime
    ended_at: datetime | None
    error_type: str | None
    message: str | None
    tokens: int


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts of a step that failed for good; ``ticket`` is the one made for it, if any."""

    step: str
    persona: str
    attempts: tuple[FailedAttempt, ...]
    rounds: int = 1
    ticket: str | None = None
    #: Differs from those of the other steps of the run.
    identity: str = ""


def failure_of(error: BaseException) -> StepFailure | None:
    """Return the attempts of the step that raised this error for good; None for other errors."""
    found = _attributes_of(error).get(_FAILURE)
    return found if isinstance(found, StepFailure) else None


def attach_failure(error: BaseException, failure: StepFailure) -> None:
    """Make ``failure_of`` return this failure for an error."""
    _attributes_of(error)[_FAILURE] = failure


# --- recording --------------------------------------------------------------------------------


def encode_error(error: BaseException) -> bytes:
    """Return the text of an exception, from which ``decode_error`` makes it again."""
    return msgspec.json.encode(_Recorder().node(error))


class _Recorder:
    """Makes the tree of one error, of a bounded size."""

    def __init__(self) -> None:
        self._errors_left = _MAX_ERRORS
        self._bytes_left = MAX_BYTES - _RESERVE
        #: The error that is recorded, and the errors that it is a part or a cause of.
        self._around: list[BaseException] = []
        #: Which of its values have no room.
        self._left_out: list[str] = []

    def node(self, error: BaseException) -> Node:
        """Return the tree of an error."""
        self._errors_left -= 1
        self._bytes_left -= _NODE_BYTES
        self._around.append(error)
        outer, self._left_out = self._left_out, []
        name = _writable(user_classes.class_name(type(error)))[:_NAME_LENGTH]
        node: Node = {"class": name, "message": self._text(error)}
        added = [self._text(lines) for lines in _own_lines(error)]
        try:
            content = self._content(error)
            if text_of(_bare(_read_back(node | content)))[:_TEXT] != text_of(error)[:_TEXT]:
                added.append(self._text(f"Recorded message: {node['message']}"))
        except Exception as problem:  # noqa: BLE001 - a class of the user's may raise anything
            content = {"stand_in": self._text(_reason(problem))}
            added.append(self._text(f"This stands for {_shown(name)}: {content['stand_in']}"))
        if self._left_out:
            names = ", ".join(self._left_out[:_MAX_NOTES])
            added.append(
                self._text(f"Not recorded, over the limit of {MAX_BYTES:,} bytes: {names}")
            )
        notes = {"notes": [*self._notes(error, _MAX_NOTES - len(added)), *added]}
        node |= content | notes | self._causes(error)
        self._left_out = outer
        self._around.pop()
        return {key: item for key, item in node.items() if item != []}

    def _content(self, error: BaseException) -> Node:
        if not isinstance(error, Exception):
            raise AtPathError("only an Exception is raised again")
        if _has_codec(error):
            item = self._value("value", error)
            if item is not None and isinstance(_read(_read_back(item)), Exception):
                return item
        user_classes.stored_name(type(error))  # raises an error if it would not be found again
        content: Node
        if isinstance(error, ExceptionGroup):
            content = {"group": self._text(error.message), "parts": self._parts(error)}
        else:
            _new(type(error))  # raises an error if it cannot be made
            content = {"args": list(self._args(error.args))}
        content["fields"] = self._named(_fields(error))
        content["attributes"] = self._named(_attributes(error))
        failure = failure_of(error)
        if failure is not None and self._has_taken("failure_of(error)", failure):
            content["failure"] = failure
        return content

    def _parts(self, group: ExceptionGroup[Exception]) -> list[Node]:
        """Return the trees of a group's errors; what is left out has a stand-in, as the last."""
        if len(self._around) >= _MAX_DEPTH:
            raise AtPathError("it stands too deep in other errors")
        nodes: list[Node] = []
        for part in group.exceptions:
            more = len(group.exceptions) - len(nodes)
            if (self._errors_left <= 1 < more) or self._bytes_left <= 0:
                self._errors_left -= 1
                message = f"{more} more errors, which were not recorded"
                why = f"of an error and those that belong to it, {_MAX_ERRORS} are recorded"
                nodes.append({"class": "builtins:Exception", "message": message, "stand_in": why})
                break
            nodes.append(self.node(part))
        return nodes

    def _args(self, args: tuple[object, ...]) -> Iterator[Node]:
        """Yield the arguments of an error; one that has no form, or no room, as its text."""
        for at, value in enumerate(args):
            if at == _MAX_ARGS or self._bytes_left <= 0:
                self._left_out.append(f"args[{at}:]")
                return
            yield self._value(f"args[{at}]", value) or {"text": self._text(value)}

    def _named(self, named: Iterable[tuple[str, object]]) -> list[tuple[str, Node]]:
        """Return names and values, in their order; not those that have no form, or no room."""
        items = (
            (name, self._value(name, value))
            for name, value in named
            if name == _writable(name) and len(name) <= _NAME_LENGTH
        )
        return [(name, item) for name, item in items if item is not None]

    def _value(self, name: str, value: object) -> Node | None:
        """Return a value as it is recorded; None if it has no form, or no room."""
        if isinstance(value, BaseException) and not _has_codec(value):
            return {"error": self.node(value)} if self._has_room(value) else None
        try:
            item = {"value": msgspec.Raw(values.encode(value).data)}
        except Exception:  # noqa: BLE001 - codecs and classes of the user's may raise anything
            return None
        return item if self._has_taken(name, item) else None

    def _notes(self, error: BaseException, count: int) -> list[str]:
        given = _attributes_of(error).get("__notes__")
        texts = [each for each in given if isinstance(each, str)] if type(given) is list else []
        return [self._text(each) for each in texts[:count] if self._bytes_left > 0]

    def _causes(self, error: BaseException) -> Node:
        cause, context = error.__cause__, error.__context__
        if cause is not None:
            return {"cause": self.node(cause)} if self._has_room(cause) else {}
        if error.__suppress_context__:
            return {"suppressed": True}
        if context is not None and self._has_room(context):
            return {"context": self.node(context)}
        return {}

    # --- how much of it ---

    def _has_room(self, error: BaseException) -> bool:
        is_around = any(error is each for each in self._around)
        has_room = self._errors_left > 0 and self._bytes_left > 0
        return has_room and not is_around and len(self._around) < _MAX_DEPTH

    def _has_taken(self, name: str, item: object) -> bool:
        """Return whether there is room for a value, and take it; a large one leaves some."""
        size = len(msgspec.json.encode((name, item)))
        if size + (_RESERVE if size > _LARGE else 0) > self._bytes_left:
            self._left_out.append(name)
            return False
        self._bytes_left -= size
        return True

    def _text(self, value: object) -> str:
        text = cut(text_of(value), _TEXT if self._bytes_left > 0 else _SHORT_TEXT)
        self._bytes_left -= len(msgspec.json.encode(text))
        return text


def _read_back(tree: Node) -> Any:
    """Return a tree as it is read from its text."""
    return msgspec.json.decode(msgspec.json.encode(tree))


def _has_codec(error: BaseException) -> bool:
    return user_classes.codecs.find(type(error)) is not None


def _attributes_of(error: BaseException) -> dict[str, Any]:
    """Return the dictionary of an error, whatever its class says about attributes."""
    found: dict[str, Any] = _ATTRIBUTES.__get__(error)
    return found


def _attributes(error: BaseException) -> Iterator[tuple[str, object]]:
    for name, value in list(_attributes_of(error).items()):
        if name not in ("__notes__", _FAILURE):
            yield name, value


def _fields(error: BaseException) -> Iterator[tuple[str, object]]:
    """Yield slots, and the fields of classes written in C: they are not in the dictionary."""
    seen = {"__dict__", "__weakref__"}
    for kind in type(error).__mro__:
        if kind in (BaseExceptionGroup, BaseException, object):
            continue
        if kind is AttributeError:
            seen.add("obj")  # the whole object that lacks the attribute
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


def _own_lines(error: BaseException) -> Iterator[str]:
    """Yield the user's lines of a traceback, as one note; nothing if there are none."""
    frames = [each for each in traceback.walk_tb(error.__traceback__) if not is_hidden(each[0])]
    with suppress(Exception):  # a source that cannot be read is no reason to fail
        lines = traceback.StackSummary.extract(iter(frames[-_MAX_FRAMES:])).format()
        while len(lines) > 1 and sum(map(len, lines)) > _TEXT - len(_LINES):
            del lines[0]
        if lines:
            yield _LINES + "".join(lines).rstrip()


def is_hidden(frame: FrameType) -> bool:
    """Return whether a frame is none of the user's."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _HIDDEN


# --- making -----------------------------------------------------------------------------------


def decode_error(data: bytes) -> Exception:
    """Return the exception of a text, or the stand-in for it; its constructor is not called.

    Its class must be imported in this process: nothing is imported by name.
    """
    return make_error(msgspec.json.decode(data))


def make_error(tree: Node) -> Exception:
    """Return the exception of a text that was read as JSON already."""
    try:
        error = _bare(tree)
    except Exception as problem:  # noqa: BLE001 - a class of the user's may raise anything
        error = RecordedError(_shown(tree["class"]), tree["message"], _reason(problem))
    if "notes" in tree:
        _attributes_of(error)["__notes__"] = tree["notes"]
    for name in ("cause", "context"):
        if name in tree:
            _set(error, f"__{name}__", make_error(tree[name]))
    if "suppressed" in tree:
        _set(error, "__suppress_context__", True)
    if "failure" in tree:
        with suppress(msgspec.ValidationError):  # of another version
            attach_failure(error, msgspec.convert(tree["failure"], StepFailure))
    return error


def _bare(node: Node) -> Exception:
    """Return an exception without its notes and causes; raise an error if it cannot be made."""
    if "stand_in" in node:
        return RecordedError(_shown(node["class"]), node["message"], node["stand_in"])
    if "value" in node:
        made: Exception = _read(node)
        return made
    kind = user_classes.known_class(node["class"], Exception)
    parts = [node["group"], [make_error(part) for part in node["parts"]]] if "parts" in node else []
    made = _new(kind, *parts)
    fields = _read_named(node.get("fields", ()))
    for unicode, names in _UNICODE_FIELDS.items():
        if isinstance(made, unicode):
            with suppress(TypeError):
                unicode.__init__(made, *[fields.pop(name, None) for name in names])
    if "args" in node:
        _set(made, "args", tuple(map(_read_argument, node["args"])))
    for name, value in fields.items():
        with suppress(AttributeError, TypeError):  # it cannot be set
            _set(made, name, value)
    _attributes_of(made).update(_read_named(node.get("attributes", ())))
    return made


def _read(item: Node) -> Any:
    if "error" in item:
        return make_error(item["error"])
    return values.decode_tree(item["value"]) if "value" in item else item["text"]


def _read_argument(item: Node) -> Any:
    """Return an argument; its text if its class is gone."""
    try:
        return _read(item)
    except MaestroError:
        return msgspec.json.encode(item["value"]).decode()


def _read_named(items: Iterable[tuple[str, Node]]) -> dict[str, Any]:
    """Return values by name; not those whose class is gone."""
    found: dict[str, Any] = {}
    for name, item in items:
        with suppress(MaestroError):
            found[name] = _read(item)
    return found


def _new(kind: type[Exception], *args: object) -> Exception:
    """Return an instance, made by the class written in C that it is based on."""
    base: Any = kind
    while not isinstance(vars(base).get("__new__"), BuiltinFunctionType):
        base = base.__base__
    try:
        made: Exception = base.__new__(kind, *args)
    except Exception as error:
        raise AtPathError(
            f"its class cannot be made without its constructor ({text_of(error)});"
            f" maestro_hive.register_codec({kind.__qualname__}, encode, decode) can say how it is"
        ) from error
    return made


def _set(error: Exception, name: str, value: object) -> None:
    """Set an attribute, whatever the class of the error says about that."""
    BaseException.__setattr__(error, name, value)


# --- texts ------------------------------------------------------------------------------------


def text_of(value: object) -> str:
    """Return a value as text that can be written, also if its ``__str__`` raises."""
    try:
        return _writable(str(value))
    except Exception:  # noqa: BLE001 - recording a failure must not fail
        return f"{type(value).__name__}, whose __str__ raised an error"


def _writable(text: str) -> str:
    """Return a text with lone surrogates, which UTF-8 cannot encode, escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(name: str) -> str:
    """Return the name of a class as tracebacks show it."""
    return name.removeprefix("builtins:").replace(":", ".", 1)


def _reason(problem: Exception) -> str:
    if isinstance(problem, AtPathError):
        return problem.reason
    if isinstance(problem, MaestroError):
        return text_of(problem)
    return f"making it again raised {type(problem).__name__}: {text_of(problem)}"
