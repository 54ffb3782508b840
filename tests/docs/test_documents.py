"""What README and docs print is what happens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from docs.generate.executed_page import execute, files_of, is_as_printed
from docs.generate.pages import EXECUTED, ROOT

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.parametrize("name", EXECUTED)
def test_what_a_page_prints_is_what_happens(name: str, tmp_path: Path) -> None:
    page = (ROOT / name).read_text()
    assert execute(page, tmp_path) == page


def test_the_readme_program_dies_in_its_first_life_and_nothing_is_done_twice(
    tmp_path: Path,
) -> None:
    program = readme_program(tmp_path)
    run(program, ends=-signal.SIGKILL)
    assert run(program).count("implementing payment in attempt 2") == 1
    assert run(program) == "['cart works', 'payment works']\n"


def test_the_readme_program_is_short() -> None:
    code = [line for line in files_of(README)["page.py"].splitlines() if line.strip()]
    said = [line for line in code if not line.startswith(("import", "from", "@"))]
    assert len(said) <= 15
    assert len(code) <= 20


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_demonstration_shows_that_nothing_is_done_twice() -> None:
    printed = run(ROOT / "examples" / "demo.py")
    assert "What was finished stayed finished." in printed
    assert printed.count("kept, not called again") == 2
    assert "maestro show demo" in printed


@pytest.mark.parametrize("altered", [False, True])
def test_the_storage_format_page_can_check_a_document(tmp_path: Path, *, altered: bool) -> None:
    program = readme_program(tmp_path)
    run(program, ends=-signal.SIGKILL)
    run(program)
    document = tmp_path / "state" / "runs" / "checkout-42" / "execution_state.json"
    if altered:
        document.write_bytes(document.read_bytes().replace(b"payment", b"paymemt", 1))
    page = (ROOT / "docs" / "storage-format.md").read_text()
    script = re.search(
        r"<<'EOF'\n(.*?)^EOF$", block(page, "sh", "hashlib"), re.DOTALL | re.MULTILINE
    )
    assert script is not None
    checker = tmp_path / "check.py"
    checker.write_text(script.group(1))
    verdict, _, rest = run(checker, str(document)).partition("\n")
    assert verdict == ("DAMAGED" if altered else "sound")
    assert '"workflow_id": "checkout-42"' in rest


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


# --- the comparison itself ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shown, printed",
    [
        ("took: 3 s\n", "took: 12 s\n"),
        ("until in 6 d\n", "until in 7 d\n"),
        ("begun  now\n", "begun  2 min ago\n"),
        ("at 2026-01-01 10:00:00\n", "at 2027-11-30 23:59:59\n"),
        ("a\n…\nz\n", "a\nb\nc\nz\n"),
        ("a\n…\nz\n", "a\nz\n"),
        ("by process 1 on here, now\n", "by process 99 on there, 4 s ago\n"),
        ("run x-0123abcd\n", "run x-99999999\n"),
    ],
)
def test_what_differs_from_one_time_to_the_next_may_differ(shown: str, printed: str) -> None:
    assert is_as_printed(shown, printed)


@pytest.mark.parametrize(
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
def test_what_does_not_may_not(shown: str, printed: str) -> None:
    assert not is_as_printed(shown, printed)


def test_a_page_that_is_no_longer_true_is_put_right(tmp_path: Path) -> None:
    page = "```python a.py\nprint(1 + 1)\n```\n\n```console\n$ python a.py\n3\n```\n"
    assert execute(page, tmp_path) == page.replace("\n3\n", "\n2\n")


def test_a_block_that_nobody_executes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor something typed"):
        execute("```python\nprint(1)\n```\n", tmp_path)
