"""The repository keeps what its README, Makefile and requirement files promise."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import maestro_hive

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENT_FILES = [f"requirements/{name}.txt" for name in ("dev", "runtime")]

COMMENT = re.compile(r" *#[^/\\]*")
PIN = re.compile(r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9a-z.+]+)(?: ; [\w .'!<>=()]+)? \\")
HASH = re.compile(r" {4}--hash=sha256:[0-9a-f]{64}(?: \\)?")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pyproject() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def pins(name: str) -> dict[str, str]:
    found = (PIN.fullmatch(line) for line in read(name).splitlines())
    return {pin["name"]: pin["version"] for pin in found if pin}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", requirement)[0].lower() for requirement in requirements}


@pytest.mark.parametrize("name", REQUIREMENT_FILES)
def test_requirements_hold_pins_and_hashes_and_no_address(name: str) -> None:
    """No line names a registry, a host or a path: each is a comment, a pin or a hash."""
    odd = [
        line
        for line in read(name).splitlines()
        if not (COMMENT.fullmatch(line) or PIN.fullmatch(line) or HASH.fullmatch(line))
    ]
    assert odd == []


@pytest.mark.parametrize("name", REQUIREMENT_FILES)
def test_every_pin_has_a_hash(name: str) -> None:
    lines = read(name).splitlines()
    unhashed = [
        line
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if PIN.fullmatch(line) and not HASH.fullmatch(following)
    ]
    assert unhashed == []


def test_everything_pyproject_asks_for_is_pinned() -> None:
    """A new dependency without `make lock` fails here."""
    project = pyproject()["project"]
    runtime = names(project["dependencies"] + pyproject()["build-system"]["requires"])
    assert runtime - pins("requirements/runtime.txt").keys() == set()
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    assert names(extras) - {"maestro-hive"} - pins("requirements/dev.txt").keys() == set()


def test_what_is_tested_and_measured_is_what_is_installed() -> None:
    assert pins("requirements/runtime.txt").items() <= pins("requirements/dev.txt").items()


def test_the_build_backend_is_named_once_in_two_places() -> None:
    assert pyproject()["dependency-groups"]["build"] == pyproject()["build-system"]["requires"]


def test_the_makefile_has_every_word_that_the_readme_names() -> None:
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", read("README.md"), flags=re.DOTALL))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", code))
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), flags=re.MULTILINE))
    assert {"check", "test"} <= named
    assert named - targets == set()


def test_no_file_is_mistaken_for_a_word_of_the_makefile() -> None:
    """A folder named `size` must not make `make size` answer "up to date"."""
    makefile = read("Makefile")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    phony = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert targets == set(" ".join(phony).split())


def test_the_package_knows_its_version() -> None:
    assert maestro_hive.__version__ == pyproject()["project"]["version"]
