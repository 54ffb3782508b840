"""Which paths a call names, where they lead, and what patterns match."""

from __future__ import annotations

import functools
import os
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.policy_paths import (
    PathPattern,
    arguments_of,
    place_of,
    places_asked,
    targets_of,
)
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

Pair = namedtuple("Pair", "name file_path")  # noqa: PYI024 - as users have them


@dataclass
class Job:
    title: str
    output_file: str


@for_each(
    "name",
    "path file_path target file filename dest destination source src dst folder directory cwd paths"
    " files filePath TARGET output_path input_files log_dir out-folder".split(),
)
def test_an_argument_is_a_path_by_its_name(name: str) -> None:
    assert targets_of({"text": "no", name: "a.py"}) == ["a.py"]


@for_each("name", "text profile filed pathology content filter subdirectoryname".split())
def test_other_arguments_are_none(name: str) -> None:
    assert targets_of({name: "a.py"}) == []


@for_each(
    "arguments, expected",
    [
        ({"path": "a.py", "target": ".env"}, ["a.py", ".env"]),
        ({"paths": ["a", "b", "a"]}, ["a", "b"]),
        ({"options": {"deep": [{"dest": "x"}, {"text": "y"}]}}, ["x"]),
        ({"anything": {"k": [PurePosixPath("p"), (Path("q"),)]}}, ["p", "q"]),
        ({"files": {"a.py": "print()", "sub": ["b"]}}, ["a.py", "print()", "sub", "b"]),
        ({"path": b"raw"}, ["raw"]),
        ({"job": Job("t", "out.txt")}, ["out.txt"]),
        ({"pair": Pair("n", "f")}, ["f"]),
        ({"items": {"one", Path("in-a-set")}}, ["in-a-set"]),
        ({"path": None, "target": "", "file": 5}, []),
        ({"mapping": {Path("key"): 1}}, ["key"]),
    ],
)
def test_paths_are_found_wherever_they_are(arguments: dict[str, Any], expected: list[str]) -> None:
    assert targets_of(arguments) == expected


def test_a_list_that_contains_itself_has_an_end() -> None:
    endless: list[Any] = ["a"]
    endless.append(endless)
    assert targets_of({"paths": endless}) == ["a"]


def write(path: str, *paths: str, folder: str = "here", **more: str) -> None:
    """Take paths in every way."""


@for_each(
    "task, args, kwargs, expected",
    [
        (write, ("a",), {}, ["a", "here"]),
        (write, ("a", "b", "c"), {"folder": "f", "dst": "d"}, ["a", "b", "c", "f", "d"]),
        (functools.partial(write, "bound"), ("b",), {}, ["bound", "b", "here"]),
        (functools.partial(write, folder="f"), ("a",), {}, ["a", "f"]),
        (functools.partial(functools.partial(write, "x"), "y"), (), {}, ["x", "y", "here"]),
        (os.remove, ("gone",), {}, ["gone"]),
        (max, ("unnamed", "arguments"), {}, ["unnamed", "arguments"]),
    ],
)
def test_arguments_have_the_names_that_the_function_gives_them(
    task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[str]
) -> None:
    assert sorted(targets_of(arguments_of(task, args, kwargs))) == sorted(expected)


# --- where they lead ------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A folder with a link to its parent, one to a secret, and one that leads to itself."""
    folder = tmp_path / "work"
    (folder / "src").mkdir(parents=True)
    (folder / "secrets").mkdir()
    (folder / "secrets" / "key").touch()
    (folder / "src" / "out").symlink_to("..")
    (folder / "src" / "innocent").symlink_to("../secrets/key")
    (folder / "src" / "loop").symlink_to("loop")
    (folder / "src" / "etc").symlink_to("/etc")
    return folder


def test_a_plain_path_is_asked_about_once(workspace: Path) -> None:
    for plain in ("a.py", "src/a.py", "./src/a.py", "src//a.py", "src/", str(workspace / "a.py")):
        assert places_asked(plain, workspace) == [plain]


def test_a_path_that_leads_elsewhere_is_asked_about_twice(workspace: Path) -> None:
    def asked(path: str) -> list[str]:
        return places_asked(path, workspace)

    assert asked("src/../.env") == ["src/../.env", ".env"]
    assert asked("src/innocent") == ["src/innocent", "secrets/key"]
    assert asked("src/out/.env") == ["src/out/.env", ".env"]
    assert asked("src/etc/passwd") == ["src/etc/passwd", "/etc/passwd"]
    assert asked("../x") == ["../x", str(workspace.parent / "x")]
    assert asked("file:///etc/pass%77d") == ["file:///etc/pass%77d", "/etc/passwd"]
    assert asked("~/.ssh/id")[1] == str(Path("~/.ssh/id").expanduser())
    inside = str(workspace / "src" / "innocent")
    assert asked(inside) == [inside, str(workspace / "secrets" / "key")]


def test_what_cannot_be_resolved_is_taken_by_its_name(workspace: Path) -> None:
    assert place_of("a\0b", workspace).resolved == f"{workspace}/a\0b"
    assert places_asked("src/loop", workspace)[0] == "src/loop"


def test_a_workspace_may_be_named_through_a_link(tmp_path: Path, workspace: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(workspace)
    pattern = PathPattern("src/**", link)
    for path in ("src/a", str(link / "src" / "a"), str(workspace / "src" / "a")):
        assert pattern.allows(place_of(path, link)), path


# --- patterns -------------------------------------------------------------------------------------


@for_each(
    "pattern, covered, others",
    [
        (".env", [".env", "a/.env", ".ENV", ".env/x", "/etc/.env"], ["a.env", ".env.example"]),
        ("*.pem", ["k.pem", "a/b/K.PEM"], ["k.pem.txt"]),
        ("secrets/**", ["secrets", "secrets/a", "Secrets/a/b"], ["a/secrets", "secrets2"]),
        ("secrets/", ["secrets", "secrets/a"], ["secrets2"]),
        ("**/keys/*", ["keys/a", "x/y/keys/a", "keys/a/b"], ["keysx/a"]),
        ("a/*/c", ["a/b/c"], ["a/c", "a/b/b/c"]),
        ("a/?.[ch]", ["a/x.c", "a/y.h"], ["a/xx.c", "a/x.o"]),
        ("a/[!x]", ["a/y"], ["a/x"]),
        ("/etc/**", ["/etc", "/etc/passwd", "src/etc/passwd"], ["etc/passwd", "/etcetera"]),
        ("/**", ["/", "/x", "anything"], []),
        ("cafe\u0301", ["caf\u00e9"], ["cafe"]),
    ],
)
def test_what_forbids_covers_all_below_in_any_case(
    workspace: Path, pattern: str, covered: list[str], others: list[str]
) -> None:
    made = PathPattern(pattern, workspace)
    assert [path for path in covered if not made.forbids(place_of(path, workspace), "write")] == []
    assert [path for path in others if made.forbids(place_of(path, workspace), "write")] == []


def test_a_folder_is_not_deleted_with_what_is_forbidden_in_it(workspace: Path) -> None:
    made = PathPattern("secrets/deep/*.key", workspace)
    for folder in (".", "secrets", "secrets/deep", "..", "/"):
        assert made.forbids(place_of(folder, workspace), "delete"), folder
        assert not made.forbids(place_of(folder, workspace), "read"), folder
    assert not made.forbids(place_of("src", workspace), "delete")


@pytest.mark.parametrize(
    "pattern, allowed, others",
    [
        ("src/**", ["src", "src/a", "src/b/c", "src/../src/a"], ["SRC/a", "src2", "src/innocent"]),
        ("src/*", ["src/a"], ["src/a/b", "src/etc", "src/../.env"]),
        ("*.py", ["a.py", "src/a.py"], ["a.PY", "/etc/a.py", "a.py/b", "src/etc/a.py"]),
        ("/etc/*", ["/etc/x1"], ["etc/x1"]),
    ],
)
def test_what_allows_matches_exactly_by_name_and_by_place(
    workspace: Path, pattern: str, allowed: list[str], others: list[str]
) -> None:
    made = PathPattern(pattern, workspace)
    assert [path for path in allowed if not made.allows(place_of(path, workspace))] == []
    assert [path for path in others if made.allows(place_of(path, workspace))] == []
