"""Names and texts use the words of the glossary, and none of those that it retires."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING

import pytest

from docs.generate.pages import ROOT
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGE = ROOT / "src" / "maestro_hive"
GLOSSARY = ROOT / "docs" / "glossary.md"

PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob(".github/**/*.md")]
    # The glossary quotes the words; the reference is made from the docstrings.
    if page != GLOSSARY and page.parent != ROOT / "docs" / "reference"
)


@cache
def retired(heading: str) -> tuple[str, ...]:
    """Return the words in the first column of one of the glossary's tables of retired words."""
    table = GLOSSARY.read_text(encoding="utf-8").partition(f"| {heading} |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| ([^-|][^|]*) \|", table, re.MULTILINE)
    return tuple(word.strip() for cell in cells for word in cell.split(","))


def test_the_glossary_retires_words() -> None:
    assert {"kept", "begun", "letters", "shelf", "shelves"} <= set(retired("not in names"))
    assert {"Tell whether", "anew", "begun", "letters"} <= set(retired("not in texts"))


def test_the_terms_of_the_glossary_are_in_order_and_explained() -> None:
    terms = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text().partition("## Retired")[0], re.MULTILINE
    )[1:]
    words = [word for word, _ in terms]
    assert words == sorted(words, key=str.lower)
    assert all(meaning[0].isupper() and meaning.endswith(".") for _, meaning in terms)


def packages() -> list[str]:
    return sorted(
        {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    )


def sources(package: str) -> list[Path]:
    folder = PACKAGE / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


@pytest.mark.parametrize("package", packages())
def test_no_identifier_and_no_text_of_the_code_has_a_retired_word(package: str) -> None:
    words = set(retired("not in names"))
    found = []
    for file in sources(package):
        source = file.read_text(encoding="utf-8")
        nodes = list(ast.walk(parsed(source)))
        names = sorted({file.stem, *identifiers(nodes)})
        found += [f"{file}: {name}" for name in names if words & set(parts(name))]
        texts = [*strings(nodes), *comments(source)]
        if retired_in("\n\n".join(text for _, text in texts)):  # once, and not for each text
            for line, text in texts:
                found += [f"{file}:{line}: {word}" for word in retired_in(text)]
    assert found == []


@for_each("page", PAGES)
def test_no_page_has_a_retired_word(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert retired_in(prose) == []


# --- names and texts of a source file -------------------------------------------------------------


def identifiers(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield every name that a file defines: modules, classes, functions, arguments, variables."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr
            case ast.alias(asname=str(name)):
                yield name
            case _:
                pass


def parts(identifier: str) -> list[str]:
    """Return the words of an identifier: ``_keptStep`` has ``kept`` and ``step``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return spaced.lower().split("_")


def parsed(source: str) -> ast.AST:
    """Parse it, in a thread of its own: Python 3.11 may miscount how deep this one's calls are."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ast.parse, source).result()


def strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and messages of a file, with their lines."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file, with their lines; none if no line can have a retired word in one."""
    if not retired_in(source):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def _retired_words() -> re.Pattern[str]:
    words = "|".join(re.escape(word) for word in retired("not in texts"))
    return re.compile(rf"\b(?:{words})\b", re.IGNORECASE)


def retired_in(text: str) -> list[str]:
    """Return the retired words in a text."""
    return _retired_words().findall(text)


@for_each(
    "name, words",
    [
        ("kept_step", ["kept", "step"]),
        ("KeptStep", ["kept", "step"]),
        ("_read", ["", "read"]),
        ("sha256", ["sha256"]),
    ],
)
def test_an_identifier_is_split_into_its_words(name: str, words: list[str]) -> None:
    assert parts(name) == words


def test_a_retired_word_is_found_whatever_its_case_and_not_inside_another_word() -> None:
    assert retired_in("Begun.") == ["Begun"]
    assert retired_in("tell whether it was begun anew") == ["tell whether", "begun", "anew"]
    assert retired_in("recommended") == []


def test_a_retired_word_is_found_in_a_comment() -> None:
    source = 'a = "#"  # begun\nb = 1  # nothing\n'
    assert list(comments(source)) == [(1, "# begun"), (2, "# nothing")]
    assert list(comments("b = 1  # nothing\n")) == []
