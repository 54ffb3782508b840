"""What the code says of itself, read from its source: so it reads alike under every Python."""

from __future__ import annotations

import ast
import enum
import inspect
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

#: Public methods that are there for other parts of ours.
_INTERNAL = {"run_child"}
#: Longer signatures are written one parameter to a line.
_WIDTH = 88

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """A field, a property or a member of an enum: how it is written, and what is said of it."""

    name: str
    text: str
    promise: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method: its signature, and its docstring."""

    name: str
    text: str
    promise: str


# --- where it stands ------------------------------------------------------------------------------


@cache
def _module(name: str) -> tuple[ast.Module, list[str]]:
    text = Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def definition(thing: Any) -> ast.ClassDef | Function:
    """Return the definition of a class or a function, as it stands in its module."""
    tree, _ = _module(thing.__module__)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and node.name == thing.__name__:
            return node
    raise LookupError(f"{thing.__module__} has no definition of {thing.__name__}")


def documentation(thing: Any) -> str:
    """Return a docstring as Markdown; empty if there is none, or none of its own."""
    return as_markdown(inspect.cleandoc(thing.__doc__ or ""))


def as_markdown(text: str) -> str:
    """Return the text of a docstring as Markdown: names as code, drawings as they are drawn."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```text\n{each.replace('``', '')}\n```" if "├──" in each else each.replace("``", "`")
        for each in paragraphs
    )


# --- signatures -----------------------------------------------------------------------------------


def signature(node: Function, called: str, *, bound: bool = False, returns: bool = True) -> str:
    """Return how a function is called; ``bound`` leaves its first parameter out."""
    parameters = _parameters(node.args)[1 if bound else 0 :]
    result = f" -> {ast.unparse(node.returns)}" if returns and node.returns else ""
    word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{word}{called}({', '.join(parameters)}){result}"
    if len(line) <= _WIDTH:
        return line
    lines = "".join(f"    {each},\n" for each in parameters)
    return f"{word}{called}(\n{lines}){result}"


def _parameters(given: ast.arguments) -> list[str]:
    plain = [*given.posonlyargs, *given.args]
    without = len(plain) - len(given.defaults)
    texts = [_parameter(each) for each in plain[:without]]
    texts += map(_parameter, plain[without:], given.defaults)
    if given.posonlyargs:
        texts.insert(len(given.posonlyargs), "/")
    if given.vararg is not None:
        texts.append(f"*{_parameter(given.vararg)}")
    elif given.kwonlyargs:
        texts.append("*")
    texts += map(_parameter, given.kwonlyargs, given.kw_defaults)
    if given.kwarg is not None:
        texts.append(f"**{_parameter(given.kwarg)}")
    return texts


def _parameter(given: ast.arg, default: ast.expr | None = None) -> str:
    kind = f": {ast.unparse(given.annotation)}" if given.annotation else ""
    equals = " = " if kind else "="
    return f"{given.arg}{kind}{f'{equals}{ast.unparse(default)}' if default else ''}"


def constructor(kind: type) -> str | None:
    """Return how an object is made; None if its fields say it, or the language does."""
    for each in kind.__mro__:
        if not _is_ours(each):
            continue
        for node in _body(each):
            if isinstance(node, Function) and node.name == "__init__":
                return signature(node, kind.__name__, bound=True, returns=False)
    return None


# --- members --------------------------------------------------------------------------------------


def attributes(kind: type) -> list[Attribute]:
    """Return the public fields, properties and members of a class, inherited ones of ours too."""
    found: dict[str, Attribute] = {}
    for each in reversed(kind.__mro__):
        if _is_ours(each):
            found.update((one.name, one) for one in _own_attributes(each))
    return list(found.values())


def _own_attributes(kind: type) -> list[Attribute]:
    found = []
    for node in _body(kind):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if "ClassVar" not in ast.unparse(
                node.annotation
            ):
                found.append(_field(kind, name, node))
            case ast.Assign(targets=[ast.Name(id=name)]) if issubclass(kind, enum.Enum):
                text = f"{name} = {ast.unparse(node.value)}"
                found.append(Attribute(name=name, text=text, promise=_note(kind, node)))
            case ast.FunctionDef() if _is_property(node):
                result = f": {ast.unparse(node.returns)}" if node.returns else ""
                promise = as_markdown(ast.get_docstring(node) or "")
                found.append(
                    Attribute(name=node.name, text=f"{node.name}{result}", promise=promise)
                )
            case ast.FunctionDef(name="__init__"):
                found += _set_when_made(kind, node)
            case _:
                pass
    return [one for one in found if not one.name.startswith("_")]


def _field(kind: type, name: str, node: ast.AnnAssign) -> Attribute:
    """Describe a field; of a setting, also the environment variable that gives it."""
    default, note = node.value, _note(kind, node)
    match default:
        case ast.Call(func=ast.Name(id="setting"), args=[first, _, *rest]):
            default = _made_by(first)
            variables = [str(each.value) for each in rest if isinstance(each, ast.Constant)]
            note = " ".join([*filter(None, [note]), *(f"Environment: `{x}`." for x in variables)])
        case ast.Call():  # field(…): what it is made by does not matter here
            default = None
        case _:
            pass
    equals = f" = {ast.unparse(default)}" if default else ""
    text = f"{name}: {ast.unparse(node.annotation)}{equals}"
    return Attribute(name=name, text=text, promise=note)


def _made_by(given: ast.expr) -> ast.expr:
    """Return the default of a setting, which may be a value or what makes it."""
    match given:
        case ast.Lambda(body=ast.Call(args=[value])):
            return value
        case ast.Name():
            return ast.Call(given, [], [])
        case _:
            return given


def _set_when_made(kind: type, made: ast.FunctionDef) -> list[Attribute]:
    """Return what ``__init__`` sets and says something of."""
    given = {each.arg: each.annotation for each in [*made.args.args, *made.args.kwonlyargs]}
    found = []
    for node in made.body:
        match node:
            case ast.Assign(targets=[ast.Attribute(attr=name)]) if _note(kind, node):
                annotation = given.get(name)
                text = f"{name}: {ast.unparse(annotation)}" if annotation else name
                found.append(Attribute(name=name, text=text, promise=_note(kind, node)))
            case _:
                pass
    return found


def _note(kind: type, node: ast.stmt) -> str:
    """Return what the ``#:`` lines above a statement say."""
    _, lines = _module(kind.__module__)
    said: list[str] = []
    number = node.lineno - 2
    while number >= 0 and lines[number].strip().startswith("#:"):
        said.insert(0, lines[number].strip().removeprefix("#:").strip())
        number -= 1
    return as_markdown(" ".join(said))


def methods(kind: type, described: frozenset[type] = frozenset()) -> list[Method]:
    """Return the public methods of a class in the order of its source, inherited ones first.

    Those that it inherits from classes that are ``described`` themselves are left out.
    """
    found: dict[str, Method] = {}
    for each in reversed(kind.__mro__):
        if _is_ours(each) and (each is kind or each not in described):
            for method in (_method(kind, node) for node in _own_methods(each)):
                inherited = found.get(method.name, method).promise
                found[method.name] = replace(method, promise=method.promise or inherited)
    return list(found.values())


def _own_methods(kind: type) -> list[Function]:
    return [
        node
        for node in _body(kind)
        if isinstance(node, Function)
        and (not node.name.startswith("_") or node.name == "__call__")
        and node.name not in _INTERNAL
        and not _is_property(node)
        and f"{node.name}.setter" not in _decorators(node)
        and "overload" not in _decorators(node)
    ]


def _method(kind: type, node: Function) -> Method:
    called = kind.__name__ if node.name == "__call__" else node.name
    bound = "staticmethod" not in _decorators(node)
    promise = as_markdown(textwrap.dedent(ast.get_docstring(node) or ""))
    return Method(name=node.name, text=signature(node, called, bound=bound), promise=promise)


def _is_property(node: Function) -> bool:
    return bool({"property", "functools.cached_property", "cached_property"} & _decorators(node))


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(each) for each in node.decorator_list}


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("maestro_hive") and not kind.__name__.startswith("_")


def _body(kind: type) -> list[ast.stmt]:
    return definition(kind).body
