"""Reads failures out of the output of pytest, in all its styles, and out of its JSON report."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: The line above the failure of one test; lines of underscores alone are between its frames.
_TITLE = re.compile(r"_+ (?=.*[^_ ])(.+?) _+$")
#: The line above a part of the output.
_PART = re.compile(r"=+ (.+?) =+$")
#: Between an error and the one that it was raised from or in.
_CHAINED = re.compile(
    r"(?:The above exception was the direct cause|During handling of the above exception)"
)
_PLACE = re.compile(
    r"(?P<path>[^\s:][^:]*):(?P<line>\d{1,9}): ?(?:in (?P<function>.+)|(?P<error>[\w.]*))$"
)
_LINE_STYLE = re.compile(
    r"(?P<path>[^\s:][^:]*):(?P<line>\d{1,9}): (?P<error>[A-Za-z_][\w.]*): (?P<message>.*)$"
)
_NATIVE = re.compile(
    r"[ |+]*File \"(?P<path>.+)\", line (?P<line>\d{1,9})(?:, in (?P<function>.+))?$"
)
_ERROR = re.compile(r"(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
_NATIVE_ERROR = re.compile(
    r"(?P<error>(?:\w+\.)*\w*(?:Error|Exception|Group|Warning|Failed|Interrupt|Exit))(?:: (?P<message>.*))?$"
)
_SUMMARY = re.compile(r"(?P<outcome>FAILED|ERROR) (?P<node>\S.*?)(?: - (?P<message>.*))?$")
_KINDS = re.compile(r"^(?:ERROR at (?P<when>setup|teardown) of |ERROR collecting )")


@dataclass(frozen=True, slots=True)
class Found:
    """What a text says about one failure."""

    error: str | None
    message: str
    trace: str | None = None
    path: str | None = None
    line: int | None = None
    function: str | None = None
    context: dict[str, Any] = field(default_factory=dict)


def failures_in(output: str, root: Path) -> list[Found]:
    """Return the failures in the output of pytest."""
    lines = [_ESCAPES.sub("", line.rstrip()) for line in output.splitlines()]
    sections = list(_sections(lines))
    found = [_of_section(part, title, body, root) for part, title, body in sections]
    nodes = _summaries(lines)
    named = [_with_node(each, nodes) for each in found]
    told = {each.context.get("nodeid") for each in named}
    rest = [each for node, each in nodes.items() if node not in told]
    lined = list(_line_style(lines))
    return named + [_merged(each, lined) for each in rest]


def _sections(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the failure of each test: the part that it is in, its title, and its lines."""
    part, title, body = "", None, list[str]()
    for line in lines:
        new_part, new_title = _PART.match(line), _TITLE.match(line)
        if new_part is None and (new_title is None or part not in ("ERRORS", "FAILURES")):
            body.append(line)
            continue
        if title is not None:
            yield part, title, body
        title, body = None, []
        if new_part is not None:
            part = new_part[1]
        elif new_title is not None:
            title = new_title[1]
    if title is not None:
        yield part, title, body


def _of_section(part: str, title: str, body: list[str], root: Path) -> Found:
    last = max((at for at, line in enumerate(body) if _CHAINED.match(line)), default=-1)
    own = [line for line in body[last + 1 :] if not line.startswith(("[gw", "---"))]
    error, message = _error_in(own)
    path, line, function, named = _place_in(own, root)
    kind = _KINDS.match(title)
    name = title[kind.end() :] if kind else title
    collecting = kind is not None and kind["when"] is None
    context: dict[str, Any] = {"test": name}
    if part == "ERRORS":
        context["when"] = "collect" if collecting else str(kind["when"] if kind else "setup")
    if collecting and path is None:
        path = name
    return Found(
        error=error or named,
        message=message or title,
        trace="\n".join(body).strip("\n"),
        path=path,
        line=line,
        function=function
        if collecting and function != "<module>"
        else None
        if collecting
        else name,
        context=context,
    )


def _error_in(body: list[str]) -> tuple[str | None, str]:
    """Return the name of the error that was raised, and its message."""
    told = [line[1:].strip("\n") for line in body if line.startswith("E ")]
    if not any(line.strip() for line in told):
        native = [match for line in body if (match := _NATIVE_ERROR.match(line.lstrip(" |+")))]
        first = native[0] if native else None  # of a group: the group itself, not its members
        return (first["error"], first["message"] or first["error"]) if first else (None, "")
    margin = min(len(line) - len(line.lstrip()) for line in told if line.strip())
    text = "\n".join(line[margin:] for line in told).strip()
    named = [match for line in told if (match := _NATIVE_ERROR.match(line.strip()))]
    if _NATIVE.match(text.splitlines()[0]) and named:  # a SyntaxError names its place first
        return named[-1]["error"], named[-1]["message"] or named[-1]["error"]
    first_line, _, rest = text.partition("\n")
    match = _NATIVE_ERROR.match(first_line) or (
        _ERROR.match(first_line) if ":" in first_line else None
    )
    if match is None:  # of an assert statement without a message pytest shows the statement
        return "AssertionError" if text.startswith("assert ") else None, text
    message = "\n".join(filter(None, [match["message"], rest]))
    return match["error"], message or match["error"]


def _place_in(body: list[str], root: Path) -> tuple[str | None, int | None, str | None, str | None]:
    """Return where the error was raised, in the workspace if that is known, and its name."""
    inside = outside = None
    error: str | None = None
    for line in body:
        text = line.removeprefix("E").strip() if line.startswith("E ") else line
        match = _NATIVE.match(text) or _PLACE.match(text)
        if match is None:
            continue
        facts = match.groupdict()
        error = facts.get("error") or error
        if is_own(facts["path"], root):
            inside = facts
        else:
            outside = facts
    place = inside or outside
    if place is None:
        return None, None, None, error
    return place["path"], int(place["line"]), place.get("function"), error


def is_own(path: str, root: Path) -> bool:
    """Return whether a file is the workspace's own, and not an installed one."""
    if path.startswith("<") or "site-packages" in path:
        return False
    return not path.startswith("/") or Path(path).is_relative_to(root)


# --- the last lines --------------------------------------------------------------------------------


def _summaries(lines: list[str]) -> dict[str, Found]:
    """Return what the short summary says of each test, by its node id."""
    found: dict[str, Found] = {}
    for line in lines:
        match = _SUMMARY.match(line)
        if match is None or not re.search(r"\.py\b|::", match["node"]):
            continue
        node, message = match["node"], match["message"] or ""
        error = _NATIVE_ERROR.match(message)
        found[node] = Found(
            error=error["error"] if error else None,
            message=((error["message"] if error else None) or message or node),
            path=node.partition("::")[0],
            function=_test_name(node) or None,
            context={"test": _test_name(node) or node, "nodeid": node},
        )
    return found


def _test_name(node: str) -> str:
    """Return a test as its failure is titled: ``TestClass.test_method[1]``."""
    head, bracket, values = node.partition("[")
    return head.partition("::")[2].replace("::", ".") + bracket + values


def _with_node(found: Found, nodes: dict[str, Found]) -> Found:
    """Return a failure with the node id of its test, and its file if no other one is known."""
    name = found.context["test"]
    for node, summary in nodes.items():
        if name in (summary.function, node):
            context = {**found.context, "nodeid": node}
            return replace(found, context=context, path=found.path or summary.path)
    return found


def _line_style(lines: list[str]) -> Iterator[Found]:
    """Yield what ``--tb=line`` prints: a line for each failure, without the test's name."""
    for line in lines:
        match = _LINE_STYLE.match(line)
        if match is not None:
            yield Found(match["error"], match["message"], None, match["path"], int(match["line"]))


def _merged(summary: Found, lined: list[Found]) -> Found:
    """Return what the summary says of a test, with the line that ``--tb=line`` has of it."""
    for each in lined:
        same = each.error == summary.error and each.message.startswith(
            summary.message.removesuffix("...")
        )
        if same and each.path is not None and summary.path and each.path.endswith(summary.path):
            return replace(summary, path=each.path, line=each.line, message=each.message)
    return summary


# --- the JSON report -------------------------------------------------------------------------------


def failures_in_report(report: dict[str, Any], root: Path) -> Iterator[Found]:
    """Yield the failures of a report: of tests in each of their stages, and of collecting them."""
    for each in _objects(report.get("collectors")):
        if each.get("outcome") == "failed":
            node = str(each.get("nodeid", ""))
            body = str(each.get("longrepr", "")).splitlines()
            yield _of_section("ERRORS", f"ERROR collecting {node}", body, root)
    for test in _objects(report.get("tests")):
        for stage in ("setup", "call", "teardown"):
            done = test.get(stage)
            if isinstance(done, dict) and done.get("outcome") == "failed":
                yield _of_stage(str(test.get("nodeid", "")), stage, done, root)


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _of_stage(node: str, stage: str, done: dict[str, Any], root: Path) -> Found:
    found = _of_section(
        "FAILURES", _test_name(node), str(done.get("longrepr", "")).splitlines(), root
    )
    crash = done.get("crash")
    facts = crash if isinstance(crash, dict) else {}
    frames = _objects(done.get("traceback"))
    match = _NATIVE_ERROR.match((str(facts.get("message", "")).splitlines() or [""])[0])
    line, path = facts.get("lineno"), facts.get("path")
    last = str(frames[-1].get("message", "")) if frames else ""
    context = {"test": _test_name(node), "nodeid": node}
    if stage != "call":
        context["when"] = stage
    message = str(facts.get("message", found.message))
    if match is not None:
        message = message.removeprefix(f"{match['error']}: ")
    has_place = isinstance(path, str) and isinstance(line, int) and is_own(path, root)
    return replace(
        found,
        error=(match["error"] if match else None) or last or found.error,
        message=message,
        path=path if has_place else found.path or node.partition("::")[0],
        line=line if has_place else found.line,
        function=_test_name(node),
        context=context,
    )
