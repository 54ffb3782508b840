"""Measure the code and compare it with size.toml: aims, bounds, and a ratchet.

    measure.py             print the table; exit with 1 where a rule is broken
    measure.py --record    write the figures of today into size.toml

Lines of code are lines with code on them: no blanks, comments or docstrings. Tokens are names,
numbers, strings and operators, as `tokenize` reads them, without docstrings; an f-string is one
token. Data are the lines of other files of the packages that are not blank.

The rules: no figure is above the recorded one; no package and no sum is above its bound; the whole
keeps a limit of tokens per line; modules are few and short. And a commit that raises a number of
size.toml has a line `Size: why` in its body.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A value of size.toml by its keys, such as ("recorded", "kernel", "lines").
Numbers: TypeAlias = dict[tuple[str, ...], float]

_DATA = (".sql", ".json", ".toml", ".js", ".html")
_CODE = frozenset({tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP})
#: Parts of f-strings and the like, which are one token each before Python 3.12.
_OPENING, _CLOSING = ("FSTRING_START", "TSTRING_START"), ("FSTRING_END", "TSTRING_END")
_RECORDED = "[recorded]\n"


@dataclass(slots=True)
class Figures:
    """The size of a package, or of a file."""

    lines: int = 0
    tokens: int = 0
    data: int = 0

    def add(self, other: Figures) -> None:
        """Add the figures of another one."""
        self.lines += other.lines
        self.tokens += other.tokens
        self.data += other.data


@dataclass(slots=True)
class Tree:
    """The sizes of a project, by the rows of its table."""

    rows: dict[str, Figures]
    modules: dict[str, int]
    tests: int

    @property
    def whole(self) -> Figures:
        """The sum of all rows."""
        whole = Figures()
        for figures in self.rows.values():
            whole.add(figures)
        return whole


def main(words: list[str] | None = None) -> int:
    """Print the table and the broken rules; return the exit code."""
    parser = argparse.ArgumentParser(description="Measure the code, and compare with size.toml.")
    parser.add_argument("--record", action="store_true", help="write the figures into size.toml")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    options = parser.parse_args(words)
    file: Path = options.root / "size.toml"
    tree = measure(options.root, tomllib.loads(file.read_text(encoding="utf-8")))
    if options.record:
        record(file, tree)
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    print("\n".join(table_lines(tree, table)))
    broken = [*broken_rules(tree, table), *unexplained_raises(file)]
    for each in broken:
        print(f"size: {each}", file=sys.stderr)
    return 1 if broken else 0


# --- measuring -----------------------------------------------------------------------------------


def measure(root: Path, table: dict[str, Any]) -> Tree:
    """Return the sizes of a project's packages, modules and tests."""
    row_of = {
        part: row
        for row, numbers in table["packages"].items()
        for part in numbers.get("folders", [row])
    }
    source = root / "src"
    tree = Tree({row: Figures() for row in table["packages"]}, {}, 0)
    for path in sorted(source.rglob("*")):
        figures = measure_file(path)
        if figures is None:
            continue
        # Modules beside the packages are doors: import paths of existing callers.
        inside = path.relative_to(source).parts[1:]
        part = inside[0] if len(inside) > 1 else "doors"
        row = row_of.get(part, part)
        tree.rows.setdefault(row, Figures()).add(figures)
        if path.suffix == ".py":
            tree.modules[str(path.relative_to(source))] = figures.lines
    tests = (measure_file(path) for path in (root / "tests").rglob("*.py"))
    tree.tests = sum(figures.lines for figures in tests if figures)
    return tree


def measure_file(path: Path) -> Figures | None:
    """Return the size of a file; None for files that do not count."""
    if path.suffix == ".py":
        return measure_code(path.read_text(encoding="utf-8"))
    if path.suffix in _DATA:
        lines = path.read_text(encoding="utf-8").splitlines()
        return Figures(data=sum(1 for line in lines if line.strip()))
    return None


def measure_code(text: str) -> Figures:
    """Return the lines of code and the tokens of a Python module."""
    lines: set[int] = set()
    tokens, depth = 0, 0
    texts = text.splitlines()
    docstrings = set(docstring_starts(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.exact_type]
        is_opening, is_closing = name in _OPENING, name in _CLOSING
        if token.start in docstrings or not (depth or is_opening or token.type in _CODE):
            continue
        first, last = token.start[0], token.end[0]
        lines.update(number for number in range(first, last + 1) if texts[number - 1].strip())
        tokens += depth == 0
        depth += is_opening - is_closing
    return Figures(len(lines), tokens)


def docstring_starts(text: str) -> Iterator[tuple[int, int]]:
    """Yield the line and column at which each docstring of a module begins."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as first, *_]:
                    yield first.lineno, first.col_offset
                case _:
                    pass


# --- the table -----------------------------------------------------------------------------------


def table_lines(tree: Tree, table: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the printed table."""
    yield f"{'':12}{'lines':>8}{'aim':>8}{'bound':>8}{'recorded':>10}{'tokens':>9}{'data':>7}"
    aims, bounds, recorded = 0, 0, 0
    for row, figures in tree.rows.items():
        numbers = table["packages"].get(row, {})
        aim, bound = numbers.get("aim", 0), numbers.get("bound", 0)
        before = table["recorded"].get(row, {}).get("lines", 0)
        aims, bounds, recorded = aims + aim, bounds + bound, recorded + before
        yield line_of(row, figures, aim, bound, before)
    whole = tree.whole
    yield line_of("sum", whole, aims, bounds, recorded)
    yield ""
    rules = table["whole"]
    longest = max(tree.modules, key=tree.modules.__getitem__, default="none")
    yield f"{ratio(whole.tokens, whole.lines):.2f} tokens per line (at most {rules['tokens']})"
    yield f"{len(tree.modules)} modules (at most {rules['modules']})"
    yield f"longest module: {longest}, {tree.modules.get(longest, 0)} (at most {rules['module']})"
    per_line = ratio(tree.tests, whole.lines)
    yield f"{tree.tests} lines of tests, {per_line:.2f} per line (at most {rules['tests']})"


def line_of(row: str, figures: Figures, aim: int, bound: int, before: int) -> str:
    """Return one row of the table."""
    numbers = f"{figures.lines:8,}{aim:8,}{bound:8,}{before:10,}"
    return f"{row:12}{numbers}{figures.tokens:9,}{figures.data:7,}"


def ratio(part: int, whole: int) -> float:
    """Return how often the one is in the other; 0 of nothing."""
    return part / whole if whole else 0.0


def broken_rules(tree: Tree, table: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each rule that the tree breaks."""
    for row, figures in tree.rows.items():
        if row not in table["packages"]:
            yield f"{row} has no row in size.toml: give it an aim and a bound"
            continue
        if figures.lines > (bound := table["packages"][row]["bound"]):
            yield f"{row} has {figures.lines:,} lines of code, and its bound is {bound:,}"
        yield from growth(row, figures, table["recorded"].get(row, {}))
    whole, rules = tree.whole, table["whole"]
    bounds = sum(numbers["bound"] for numbers in table["packages"].values())
    if whole.lines > bounds:
        yield f"the whole has {whole.lines:,} lines of code, and the bounds add up to {bounds:,}"
    if (dense := ratio(whole.tokens, whole.lines)) > rules["tokens"]:
        yield f"the whole has {dense:.2f} tokens per line, and the bound is {rules['tokens']}"
    if len(tree.modules) > rules["modules"]:
        yield f"there are {len(tree.modules)} modules, and the bound is {rules['modules']}"
    for name, lines in tree.modules.items():
        if lines > rules["module"]:
            yield f"{name} has {lines:,} lines of code, and the bound is {rules['module']}: part it"


def growth(row: str, figures: Figures, recorded: dict[str, int]) -> Iterator[str]:
    """Yield a sentence for each figure that is above the recorded one."""
    for kind in Figures.__slots__:
        measured, before = getattr(figures, kind), recorded.get(kind, 0)
        if measured > before:
            yield (
                f"{row} has grown from {before:,} to {measured:,} ({kind}): make it smaller, or"
                " `make size-record` and put a line `Size: why` into the commit's body"
            )


def record(file: Path, tree: Tree) -> None:
    """Write the figures of today into the last section of size.toml."""
    fixed, _, _ = file.read_text(encoding="utf-8").partition(_RECORDED)
    rows = [
        f"{row} = {{ lines = {each.lines}, tokens = {each.tokens}, data = {each.data} }}\n"
        for row, each in tree.rows.items()
    ]
    file.write_text(fixed + _RECORDED + "".join(rows), encoding="utf-8")


# --- the ratchet ---------------------------------------------------------------------------------


def unexplained_raises(file: Path) -> Iterator[str]:
    """Yield a sentence for each commit that raised a number of the table and does not say why."""
    log = git(file, "log", "--no-merges", "--format=%H%x00%P%x00%B%x01", "--", file.name)
    if log is None:
        print("the history of size.toml was not read: this is no git checkout that git accepts")
        return
    for entry in filter(None, log.replace("\x01\n", "\x01").split("\x01")):
        commit, parents, body = entry.split("\x00")
        before = numbers_at(file, parents.partition(" ")[0])
        raised = raises(before, numbers_at(file, commit)) if before else []
        if raised and not any(line.startswith("Size: ") for line in body.splitlines()):
            names = ", ".join(".".join(keys) for keys in raised)
            yield f"commit {commit[:12]} raised {names}, and has no line `Size: why` in its body"


def raises(before: Numbers, after: Numbers) -> list[tuple[str, ...]]:
    """Return the numbers that are higher than before; a new one was 0."""
    return [keys for keys, number in after.items() if number > before.get(keys, 0)]


def numbers_at(file: Path, commit: str) -> Numbers:
    """Return the numbers of the table at a commit; none if it is not there."""
    text = git(file, "show", f"{commit}:./{file.name}") if commit else None
    return dict(numbers_of(tomllib.loads(text))) if text else {}


def numbers_of(
    table: dict[str, Any], before: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield each number of the table by its keys."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from numbers_of(value, (*before, key))
        elif isinstance(value, int | float):
            yield (*before, key), value


def git(file: Path, *words: str) -> str | None:
    """Return the output of a git command in the file's folder; None if it fails."""
    command = ["git", "-C", str(file.parent), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
