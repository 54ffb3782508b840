"""Whether two functions are one definition: executed again, or another one of the same name."""

from __future__ import annotations

import ast
import linecache
import weakref
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from maestro_hive.maestro.state.codec import IMMUTABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: What a closure has whose variable is not assigned yet; it may become anything.
_UNASSIGNED = object()
#: How often a source is parsed, where Python itself fails.
_PARSE_TIMES = 3
#: The pairs that are being compared: functions may contain each other.
_Pairs = set[tuple[int, int]]


def origin(function: object) -> tuple[str, str]:
    """Return where a function is defined: its module and its qualified name."""
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


def is_same_definition(known: object, new: object) -> bool:
    """Return whether ``new`` is ``known``, or was made by executing its definition again.

    A module that is reloaded and a cell of a notebook make other code: then what stands at the
    same place replaces what stood there. Code that is executed again without that, as in a loop,
    is another function as soon as it carries other values: another instance, closure or default.
    """
    return _is_same(known, new, set())


class Tasks:
    """Numbers the tasks of one identity: those of one code that carry other values are others.

    Objects are not held longer than others need them; one that has gone is never met again.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[tuple[CodeType, list[Callable[[], object]]]] = []

    @staticmethod
    def differ(task: object) -> bool:
        """Return whether there may be several of a task: it carries values besides its code."""
        return isinstance(task, MethodType) or (
            isinstance(task, FunctionType) and bool(task.__closure__ or task.__defaults__)
        )

    def number_of(self, task: object) -> int:
        """Return 1 for the first task and those that are no other one, 2 for the next, and so on."""
        function = task.__func__ if isinstance(task, MethodType) else task
        if not isinstance(function, FunctionType):
            return 1
        carried = [*_carried(function), *(function.__defaults__ or ())]
        carried += [task.__self__] if isinstance(task, MethodType) else []
        code, has_code = function.__code__, False
        for number, (known, values) in enumerate(self._known, 1):
            pairs = zip(values, carried, strict=False)
            if known is code and all(_is_same(value(), now, set()) for value, now in pairs):
                return number
            has_code = has_code or known is code
        if self._known and not has_code:
            return 1  # other code by that name: the caller says that it is the same
        self._known.append((code, [_reference(value) for value in carried]))
        return len(self._known)


def _reference(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _is_same(known: Any, new: Any, seen: _Pairs) -> bool:
    pair = id(known), id(new)
    if known is new or known is _UNASSIGNED or new is _UNASSIGNED or pair in seen:
        return True
    seen.add(pair)
    if type(known) is not type(new):
        return False
    wrapped = getattr(known, "__wrapped__", None), getattr(new, "__wrapped__", None)
    if isinstance(known, FunctionType):
        return _is_same_function(known, new, seen)
    if isinstance(wrapped[0], FunctionType):  # a step or a workflow
        return _is_same(wrapped[0], wrapped[1], seen)
    if isinstance(known, MethodType):
        return known.__self__ is new.__self__ and _is_same(known.__func__, new.__func__, seen)
    is_equal = _is_equal(*(_compared(each) for each in (known, new)))
    return is_equal and (not isinstance(known, partial) or _is_same(known.func, new.func, seen))


def _compared(value: object) -> object:
    return (value.args, value.keywords) if isinstance(value, partial) else value


def _is_same_function(known: FunctionType, new: FunctionType, seen: _Pairs) -> bool:
    if origin(known) != origin(new):
        return False
    if known.__code__ is new.__code__:
        defaults = (
            (known.__defaults__, known.__kwdefaults__),
            (new.__defaults__, new.__kwdefaults__),
        )
        carried = zip(_carried(known), _carried(new), strict=True)
        return _is_equal(*defaults) and all(_is_same(*pair, seen) for pair in carried)
    if _stand_side_by_side(known.__code__, new.__code__, new.__qualname__):
        return False
    # A module that is executed again makes other objects, and the same plain values.
    names = zip(known.__code__.co_freevars, _carried(known), strict=True)
    before = {name: value for name, value in names if type(value) in IMMUTABLE}
    now = dict(zip(new.__code__.co_freevars, _carried(new), strict=True))
    return all(
        now[name] == value
        for name, value in before.items()
        if type(now.get(name, ...)) in IMMUTABLE
    )


def _carried(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield _UNASSIGNED


def _is_equal(known: object, new: object) -> bool:
    if known is new:
        return True
    try:
        return type(known) is type(new) and bool(known == new)
    except Exception:  # noqa: BLE001 - the user's own objects
        return False


def _stand_side_by_side(known: CodeType, new: CodeType, qualname: str) -> bool:
    """Return whether one source, as it is now, has both functions by that name."""
    lines = {known.co_firstlineno, new.co_firstlineno}
    if known.co_filename != new.co_filename or len(lines) == 1:
        return False
    linecache.checkcache(new.co_filename)
    tree = _parsed("".join(linecache.getlines(new.co_filename)))
    if tree is None:
        return False
    return lines <= {line for name, line in _definitions(tree, "") if name == qualname}


def _parsed(source: str) -> ast.Module | None:
    for _ in range(_PARSE_TIMES):
        try:
            return ast.parse(source)
        except SystemError:
            continue  # Python 3.11, when garbage is collected by Python code in the middle of it
        except SyntaxError:
            break
    return None


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield the functions in a source: the qualified name, and the line of the first decorator."""
    for child in ast.iter_child_nodes(node):
        inside = prefix
        if isinstance(child, _Definition):
            first: Any = (*child.decorator_list, child)[0]
            yield prefix + child.name, first.lineno
            inside = f"{prefix}{child.name}."
            inside += "" if isinstance(child, ast.ClassDef) else "<locals>."
        yield from _definitions(child, inside)
