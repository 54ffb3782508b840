"""What README and docs print is what happens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    program = folder / "twelve_lines.py"
    program.write_text(block(README, "python", "PersonaExecutor"))
    return program


def test_the_readme_program_dies_and_goes_on_as_the_readme_says(tmp_path: Path) -> None:
    program = readme_program(tmp_path)
    ends = (-signal.SIGKILL, 0, 0)
    printed = "".join(f"$ python twelve_lines.py\n{run(program, ends=end)}" for end in ends)
    assert printed == block(README, "console", "twelve_lines.py")


def test_the_readme_program_has_twelve_lines() -> None:
    code = block(README, "python", "PersonaExecutor")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_the_demonstration_shows_that_nothing_is_done_twice() -> None:
    printed = run(ROOT / "examples" / "demo.py")
    assert "What was finished stayed finished." in printed
    assert printed.count("kept, not called again") == 3


@pytest.mark.parametrize("altered", [False, True])
def test_the_storage_format_page_can_check_a_document(tmp_path: Path, *, altered: bool) -> None:
    program = readme_program(tmp_path)
    run(program, ends=-signal.SIGKILL)
    run(program)
    document = tmp_path / "state" / "runs" / "page-42" / "execution_state.json"
    if altered:
        document.write_bytes(document.read_bytes().replace(b"review", b"reviev", 1))
    page = (ROOT / "docs" / "storage-format.md").read_text()
    script = re.search(
        r"<<'EOF'\n(.*?)^EOF$", block(page, "sh", "hashlib"), re.DOTALL | re.MULTILINE
    )
    assert script is not None
    checker = tmp_path / "check.py"
    checker.write_text(script.group(1))
    verdict, _, rest = run(checker, str(document)).partition("\n")
    assert verdict == ("DAMAGED" if altered else "sound")
    assert '"workflow_id": "page-42"' in rest


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
