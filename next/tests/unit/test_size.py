"""The command `make size`: each of its rules can fail."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from size.measure import main, measure_code

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TABLE = """
[packages]
kernel = { aim = 10, bound = 20 }
facades = { aim = 10, bound = 20, folders = ["core", "doors"] }

[whole]
tokens = 9.5
modules = 4
module = 15
tests = 1.6

[recorded]
"""

IDENTITY: Mapping[str, str] = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


class Project:
    """A made-up project with a repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "--quiet")
        self.write("size.toml", TABLE)
        self.write("src/pack/kernel/files.py", "a = 1\n" * 5)
        self.write("src/pack/core/door.py", "a = 1\n")

    def git(self, *words: str) -> None:
        command = ["git", "-C", str(self.root), *words]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **IDENTITY})

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def record(self) -> None:
        main(["--record", "--root", str(self.root)])

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def code(self) -> int:
        return main(["--root", str(self.root)])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # as in a hook: they would lead to another repository
    made = Project(tmp_path / "project")
    made.record()
    made.commit("Begin")
    return made


def message_of(project: Project, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the errors of a project that breaks a rule."""
    capsys.readouterr()
    assert project.code() == 1
    return capsys.readouterr().err


def table_of(project: Project, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    project.code()
    return capsys.readouterr().out.splitlines()[1:4]


# --- figures -------------------------------------------------------------------------------------


def test_lines_of_code_have_no_blanks_comments_or_docstrings() -> None:
    text = '''"""A docstring
of two lines."""

# a comment
def double(x: int) -> int:  # another one
    """A docstring."""
    return (
        x

        + x
    )


class Thing:
    """A docstring."""

    #: a comment
    text = """two
    lines"""
'''
    figures = measure_code(text)
    assert (figures.lines, figures.tokens) == (8, 10 + 6 + 3 + 3)


def test_an_f_string_is_one_token_in_every_version_of_python() -> None:
    assert measure_code("x = f'a {b + c!r:>{width}} d' f'{e}'\n").tokens == 4


def test_the_lines_of_other_files_are_data(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("src/pack/kernel/schema.sql", "one\n\n  \ntwo\n")
    project.record()
    assert [line.split()[-1] for line in table_of(project, capsys)] == ["2", "0", "2"]


def test_the_table_shows_each_package_beside_its_aim_its_bound_and_its_record(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line.split() for line in table_of(project, capsys)] == [
        ["kernel", "5", "10", "20", "5", "15", "0"],
        ["facades", "1", "10", "20", "1", "3", "0"],
        ["sum", "6", "20", "40", "6", "18", "0"],
    ]


def test_tests_are_counted_against_the_source(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("tests/unit/test_files.py", "a = 1\n" * 9)
    assert project.code() == 0
    assert "9 lines of tests, 1.50 per line (at most 1.6)" in capsys.readouterr().out


# --- rules ---------------------------------------------------------------------------------------


def test_a_project_that_keeps_the_rules_passes(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project.code() == 0
    assert capsys.readouterr().err == ""


def test_a_package_that_has_grown_fails(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("src/pack/kernel/files.py", "a = 1\n" * 6)
    message = message_of(project, capsys)
    assert "kernel has grown from 5 to 6 (lines)" in message
    assert "kernel has grown from 15 to 18 (tokens)" in message


def test_data_that_has_grown_fails(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.write("src/pack/kernel/schema.json", "{}\n")
    assert "kernel has grown from 0 to 1 (data)" in message_of(project, capsys)


def test_a_package_that_has_shrunk_passes(project: Project) -> None:
    project.write("src/pack/kernel/files.py", "a = 1\n")
    assert project.code() == 0


def test_a_package_above_its_bound_fails_also_when_that_is_recorded(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("src/pack/kernel/files.py", "a = 1\n" * 11)
    project.write("src/pack/kernel/clock.py", "a = 1\n" * 10)
    project.record()
    assert "kernel has 21 lines of code, and its bound is 20" in message_of(project, capsys)


def test_a_whole_above_the_sum_of_the_bounds_fails(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("kernel", "core"):
        for name in ("one", "two"):
            project.write(f"src/pack/{package}/{name}.py", "a = 1\n" * 12)
    project.record()
    assert "the whole has 54 lines of code, and the bounds add up to 40" in message_of(
        project, capsys
    )


def test_a_package_without_a_row_fails(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("src/pack/attic/files.py", "a = 1\n")
    assert "attic has no row in size.toml" in message_of(project, capsys)


def test_lines_that_are_too_dense_fail(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("src/pack/kernel/files.py", "f(a, b, c, d, e, f, g, h, i, j)\n" * 5)
    project.record()
    assert "tokens per line, and the bound is 9.5" in message_of(project, capsys)


def test_a_module_that_is_too_long_fails(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write("src/pack/kernel/files.py", "a = 1\n" * 16)
    project.record()
    message = message_of(project, capsys)
    assert "pack/kernel/files.py has 16 lines of code, and the bound is 15" in message


def test_too_many_modules_fail(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        project.write(f"src/pack/kernel/module_{number}.py", "")
    assert "there are 5 modules, and the bound is 4" in message_of(project, capsys)


# --- the ratchet ---------------------------------------------------------------------------------


def grow(project: Project) -> None:
    project.write("src/pack/kernel/files.py", "a = 1\n" * 6)
    project.record()


def test_a_raise_that_is_recorded_passes_until_it_is_committed(project: Project) -> None:
    grow(project)
    assert project.code() == 0


def test_a_commit_that_raises_a_figure_without_a_reason_fails(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    grow(project)
    project.commit("Add a line\n\nIt was missing.")
    message = message_of(project, capsys)
    assert "raised recorded.kernel.lines, recorded.kernel.tokens, and has no line" in message


def test_a_later_commit_does_not_excuse_it(project: Project) -> None:
    grow(project)
    project.commit("Add a line")
    project.write("README.md", "news")
    project.commit("Write the readme\n\nSize: of the commit before")
    assert project.code() == 1


def test_a_commit_that_gives_its_reason_passes(project: Project) -> None:
    grow(project)
    project.commit("Add a line\n\nIt was missing.\n\nSize: the line")
    assert project.code() == 0


def test_an_empty_reason_is_none(project: Project) -> None:
    grow(project)
    project.commit("Add a line\n\nSize:")
    assert project.code() == 1


def test_a_commit_that_lowers_a_figure_needs_no_reason(project: Project) -> None:
    project.write("src/pack/kernel/files.py", "a = 1\n")
    project.record()
    project.commit("Remove four lines")
    assert project.code() == 0


def test_a_bound_is_raised_with_a_reason_only(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    table = (project.root / "size.toml").read_text(encoding="utf-8")
    project.write("size.toml", table.replace("bound = 20 }", "bound = 21 }"))
    project.commit("Make room")
    assert "raised packages.kernel.bound, and has no line" in message_of(project, capsys)


def test_without_a_repository_only_the_history_is_not_checked(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project.root / ".git").rename(tmp_path / "away")
    assert project.code() == 0
    assert "the history of size.toml was not read" in capsys.readouterr().out
    project.write("src/pack/kernel/files.py", "a = 1\n" * 6)
    assert project.code() == 1
