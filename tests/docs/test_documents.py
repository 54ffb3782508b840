"""The output shown in README and docs is the output of the programs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from docs.generate.executed_page import execute, files_of, is_as_printed
from docs.generate.pages import EXECUTED, ROOT
from docs.generate.terminal import start_process
from tests.python_processes import PythonInTerminal
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from docs.generate.terminal import Process

README = (ROOT / "README.md").read_text()


def block(text: str, language: str, containing: str) -> str:
    """Return the one fenced block of this language that contains the words."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    (wanted,) = [code for code in found if containing in code]
    return str(wanted)


def run(program: Path, *arguments: str, ends: int = 0) -> str:
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(
        command, cwd=program.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == ends, done.stderr
    return done.stdout


def readme_program(folder: Path) -> Path:
    program = folder / "page.py"
    program.write_text(files_of(README)["page.py"])
    return program


#: What these commands execute.
COMMANDS = {
    "maestro": "from maestro_hive.cli import main; main()",
    "pytest": "import pytest; sys.exit(pytest.main())",
    "uvicorn": "from uvicorn import main; main()",
}
#: What ``python FILE`` executes.
SCRIPT = """
import types

def execute():
    path = os.path.abspath(sys.argv[1])
    sys.argv, sys.path[0] = sys.argv[1:], os.path.dirname(path)
    sys.excepthook = lambda kind, error, trace: print_error(kind, error, trace, path)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    with open(path, encoding="utf-8") as file:
        program = compile(file.read(), path, "exec")
    exec(program, main.__dict__)

def print_error(kind, error, trace, path):
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)

execute()
"""


def start_forked(
    words: list[str], folder: Path, environment: Mapping[str, str], terminal: int
) -> Process:
    """Start a command; where it is our own or a program of the page, fork it."""
    match words:
        case [name, *arguments] if name in COMMANDS:
            program = f"import sys; {COMMANDS[name]}"
        case ["python", file, *_] if file.endswith(".py"):
            program, arguments = SCRIPT, words[1:]
        case _:
            return start_process(words, folder, environment, terminal)
    return PythonInTerminal(program, *arguments, terminal=terminal, env=environment, cwd=folder)


@pytest.mark.parametrize("name", EXECUTED)
def test_a_page_shows_the_real_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make docs` starts what is forked here."""
    # Others are installed for our own tests, print nothing, and take most of the time of a start.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p maestro_hive.testing.plugin")
    page = (ROOT / name).read_text()
    assert execute(page, tmp_path, start_forked) == page


def test_the_readme_program_is_killed_once_and_nothing_is_done_twice(
    tmp_path: Path,
) -> None:
    program = readme_program(tmp_path)
    run(program, ends=-signal.SIGKILL)
    assert run(program).count("implementing payment in attempt 2") == 1
    assert run(program) == "['cart works', 'payment works']\n"


def test_the_readme_program_is_short() -> None:
    code = [line for line in files_of(README)["page.py"].splitlines() if line.strip()]
    statements = [line for line in code if not line.startswith(("import", "from", "@"))]
    assert len(statements) <= 15
    assert len(code) <= 20


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_storage_format_page_can_check_a_document(tmp_path: Path) -> None:
    program = readme_program(tmp_path)
    run(program, ends=-signal.SIGKILL)
    run(program)
    document = tmp_path / "state" / "runs" / "checkout-42" / "execution_state.json"
    page = (ROOT / "docs" / "storage-format.md").read_text()
    script = re.search(
        r"<<'EOF'\n(.*?)^EOF$", block(page, "sh", "hashlib"), re.DOTALL | re.MULTILINE
    )
    assert script is not None
    checker = tmp_path / "check.py"
    checker.write_text(script.group(1))
    for expected in ("sound", "DAMAGED"):
        verdict, _, rest = run(checker, str(document)).partition("\n")
        assert verdict == expected
        assert '"workflow_id": "checkout-42"' in rest
        document.write_bytes(document.read_bytes().replace(b"payment", b"paymemt", 1))


def test_links_in_the_documents_have_a_target() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob(".github/**/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_index_links_every_document() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text())
    }
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert {page.resolve() for page in written} - linked == {index}


#: Named in CONTRIBUTING.md, and not there yet.
PLANNED: set[str] = set()


def test_contributing_names_files_and_targets_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    names = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`", page))
    assert {"maestro/state/", "engine/retry_policy.py"} <= names
    places = [ROOT, ROOT / "src" / "maestro_hive"]
    missing = {name for name in names if not any((place / name).exists() for place in places)}
    assert missing <= PLANNED
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", page, re.DOTALL))
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) <= targets


def test_the_workflow_tests_every_supported_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    tested = re.findall(r'"(3\.\d+)"', workflow)
    declared = [
        each.rpartition(" ")[2]
        for each in project["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", each)
    ]
    assert tested == declared
    assert project["requires-python"] == f">={tested[0]}"


# --- the comparison itself ------------------------------------------------------------------------


@for_each(
    "shown, printed",
    [
        ("took: 3 s\n", "took: 12 s\n"),
        ("until in 6 d\n", "until in 7 d\n"),
        ("started  now\n", "started  2 min ago\n"),
        ("at 2026-01-01 10:00:00\n", "at 2027-11-30 23:59:59\n"),
        ("a\n…\nz\n", "a\nb\nc\nz\n"),
        ("a\n…\nz\n", "a\nz\n"),
        ("by process 1 on here, now\n", "by process 99 on there, 4 s ago\n"),
        ("run x-0123abcd\n", "run x-99999999\n"),
    ],
)
def test_times_and_ids_may_differ(shown: str, printed: str) -> None:
    assert is_as_printed(shown, printed)


@for_each(
    "shown, printed",
    [
        ("status: success\n", "status: failed\n"),
        ("attempt 1\n", "attempt 2\n"),
        ("a\n…\nz\n", "a\nb\n"),
        ("a\n", "a\nb\n"),
        ("a\nb\n", "a\n"),
        ("", "a\n"),
        ("run x-1\n", "run x-2\n"),
    ],
)
def test_everything_else_must_be_equal(shown: str, printed: str) -> None:
    assert not is_as_printed(shown, printed)


def test_outdated_output_is_replaced(tmp_path: Path) -> None:
    page = "```python a.py\nprint(1 + 1)\n```\n\n```console\n$ python a.py\n3\n```\n"
    assert execute(page, tmp_path) == page.replace("\n3\n", "\n2\n")


def test_a_block_that_is_not_executed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor something typed"):
        execute("```python\nprint(1)\n```\n", tmp_path)


def test_commands_go_on_under_names_and_processes_are_those_of_the_page(tmp_path: Path) -> None:
    waits = "```console goes-on {0}\n$ python wait.py\nup\n```\n"
    killed = "```console\n$ kill -9 {1}\n```\n\n```console rest {0}\nKilled\n```\n"
    page = "```python wait.py\nimport time\n\nprint('up')\ntime.sleep(60)\n```\n"
    page += waits.format("one") + waits.format("two")
    page += killed.format("two", 4712) + killed.format("one", 4711)
    assert execute(page, tmp_path) == page
