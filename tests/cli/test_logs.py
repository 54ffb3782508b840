"""``maestro logs``."""

from __future__ import annotations

import json
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, RunFailedError, current
from tests.cli.processes import complaint, in_terminal, maestro, start_maestro
from tests.hive.conftest import quick_config
from tests.planted_secrets import SHAPED, fragments
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.processes import Done


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Hive]:
    with Hive(tmp_path, quick_config()) as made:
        yield made


def written(hive: Hive, *chunks: str | bytes, run_id: str = "r") -> None:
    """Execute a run whose step ``draft`` writes these chunks."""

    @hive.step
    async def draft() -> None:
        for chunk in chunks:
            current().write(chunk)

    @hive.workflow
    async def job() -> None:
        await draft()

    hive.run_sync(job, run_id=run_id)


def flaky(hive: Hive) -> None:
    """Execute a run whose step writes in two attempts, and whose other step writes in between."""

    @hive.step
    async def outline() -> None:
        current().write("outline\n")

    @hive.step
    async def draft() -> None:
        current().write(f"attempt {current().attempt}, ")
        await outline()
        current().write("done")
        if current().attempt == 1:
            raise ValueError("again")

    @hive.workflow
    async def job() -> None:
        await draft()

    hive.run_sync(job, run_id="r")


def logs(folder: Path, *words: str) -> Done:
    return maestro("logs", "r", *words, "--store", folder)


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# --- what was written ----------------------------------------------------------------------------


def test_a_step_is_printed_as_it_wrote(tmp_path: Path, hive: Hive) -> None:
    written(hive, "Once ", "upon\n", "a ", "time")
    done = logs(tmp_path, "draft")
    assert (done.returncode, done.stdout) == (0, "Once upon\na time")
    assert logs(tmp_path, "1").stdout == done.stdout
    assert logs(tmp_path, "draft", "--after", "2").stdout == "a time"
    assert logs(tmp_path, "draft", "--after", "4").stdout == ""


def test_steps_are_told_apart_by_headings(tmp_path: Path, hive: Hive) -> None:
    flaky(hive)
    done = logs(tmp_path)
    assert done.stdout == "==> outline <==\noutline\n==> draft <==\nattempt 2, done\n"
    assert "starts over" not in done.stderr


def test_what_an_earlier_attempt_wrote_is_left_out(tmp_path: Path, hive: Hive) -> None:
    flaky(hive)
    assert logs(tmp_path, "draft").stdout == "attempt 2, done"


def test_json_has_every_chunk_with_its_number(tmp_path: Path, hive: Hive) -> None:
    flaky(hive)
    found = objects(logs(tmp_path, "draft", "--json").stdout)
    assert [(each["seq"], each["attempt"], each["restarted"]) for each in found] == [
        (1, 1, False), (3, 1, False), (4, 2, True), (5, 2, False), (6, 2, False),
    ]  # fmt: skip
    assert {(each["run_id"], each["step"]) for each in found} == {("r", "draft")}
    assert found[0]["data"] == "attempt 1, "
    assert found[0]["at"].endswith("+00:00")
    after = objects(logs(tmp_path, "--json", "--after", "4").stdout)
    assert after == found[-2:]


def test_bytes_are_printed_as_text_where_they_are_one(tmp_path: Path, hive: Hive) -> None:
    euro = "€".encode()
    written(hive, euro[:1], euro[1:], b"\xff", "!")
    assert logs(tmp_path, "draft").stdout == "€\\xff!"
    first, *_ = objects(logs(tmp_path, "--json").stdout)
    assert first["data"] == {"$": "bytes", "v": "4g=="}


SECRET = SHAPED["github"]


@pytest.mark.parametrize("words", [[], ["--json"], ["draft"], ["draft", "--json"]])
def test_a_secret_in_two_chunks_is_not_printed(
    tmp_path: Path, hive: Hive, words: list[str]
) -> None:
    half = len(SECRET) // 2
    written(hive, "the key ", "is " + SECRET[:half], SECRET[half:], " or so", ".")
    done = logs(tmp_path, *words)
    assert not [part for part in fragments(SECRET) if part in done.stdout]
    assert SECRET[half:] not in done.stdout
    kept = logs(tmp_path, *words, "--with-values").stdout
    if "--json" in words:
        data = [each["data"] for each in objects(done.stdout)]
        assert (data[0], len(data), data[-1]) == ("the key ", 5, ".")
        assert "".join(data).startswith("the key is [redacted")
        assert [each["data"] for each in objects(kept)][2] == SECRET[half:]
    else:
        assert "the key is [redacted" in done.stdout
        assert f"the key is {SECRET} or so." in kept


def test_what_was_written_cannot_control_a_terminal(tmp_path: Path, hive: Hive) -> None:
    written(hive, "\x1b[2Jred\tand\n", "more")
    assert logs(tmp_path, "draft").stdout == "\\x1b[2Jred\tand\nmore"
    seen = in_terminal("logs", "r", "draft", "--store", tmp_path)
    assert seen.text.splitlines()[-2:] == ["\\x1b[2Jred\tand", "more"]


def test_a_run_without_streams_prints_nothing(tmp_path: Path, hive: Hive) -> None:
    written(hive)
    done = logs(tmp_path, "--follow")
    assert (done.returncode, done.stdout) == (0, "")


def test_wrong_use_is_one_sentence(tmp_path: Path, hive: Hive) -> None:
    written(hive, "a")
    assert "run 'r' has no step 'darft'; did you mean draft?" in complaint(
        logs(tmp_path, "darft"), 2
    )
    wrong = maestro("logs", "q", "--store", tmp_path)
    assert "There is no run 'q'" in complaint(wrong, code=2)
    complaint(logs(tmp_path, "--after", "x"), code=2)


def test_a_purged_run_has_no_stream_and_an_export_says_what_it_lacks(
    tmp_path: Path, hive: Hive
) -> None:
    written(hive, "a", "b")
    done = maestro("export", "r", tmp_path / "r.json", "--with-values", "--store", tmp_path)
    assert done.returncode == 0
    assert "its streams (2 chunks) are not in the file" in done.stderr
    assert maestro("purge", "r", "--yes", "--store", tmp_path).returncode == 0
    assert maestro("import", tmp_path / "r.json", "--store", tmp_path).returncode == 0
    assert logs(tmp_path).stdout == ""


# --- following -----------------------------------------------------------------------------------

_PROGRAM = """
    import asyncio, sys
    from maestro_hive import ExecutionConfig, Hive, current
    from maestro_hive.unified_execution import Level1Config

    hive = Hive(sys.argv[1], ExecutionConfig(level1=Level1Config(base_delay_seconds=0)))

    @hive.step(max_attempts=2)
    def draft():
        for line in sys.stdin:
            raw = line.startswith("raw:")
            current().write(line[4:-1] if raw else line)
            print("written", flush=True)
            if line == "again\\n":
                raise ValueError(line)
            if line == "over\\n":
                return

    @hive.step
    async def review():
        current().write("reviewed")

    @hive.workflow
    async def job():
        await draft()
        await review()

    hive.run_sync(job, run_id="r")
"""


def program(folder: Path) -> PythonProcess:
    """Start a run that writes the lines it is given; return when it has written the first."""
    started = PythonProcess(textwrap.dedent(_PROGRAM), folder)
    give(started, "first\n")
    assert started.stdout.readline() == "written\n"
    return started


def give(writer: PythonProcess, lines: str) -> None:
    writer.stdin.write(lines)
    writer.stdin.flush()


def following(folder: Path, *words: str) -> PythonProcess:
    return start_maestro("logs", "r", *words, "--follow", "--store", folder)


def line_of(process: PythonProcess) -> str:
    return process.stdout.readline()


def test_a_live_stream_is_followed_to_the_end_of_its_run(tmp_path: Path) -> None:
    writer = program(tmp_path)
    follower, of_step = following(tmp_path), following(tmp_path, "draft")
    assert [line_of(follower), line_of(follower)] == ["==> draft <==\n", "first\n"]
    assert line_of(of_step) == "first\n"
    give(writer, "again\nsecond\n")
    assert [line_of(follower), line_of(follower)] == ["again\n", "second\n"]
    give(writer, "over\n")
    rest, notes = follower.communicate(timeout=60)
    assert (rest, follower.returncode) == ("over\n==> review <==\nreviewed\n", 0)
    assert "draft starts over: attempt 2" in notes
    rest, notes = of_step.communicate(timeout=60)
    assert (rest, of_step.returncode) == ("again\nsecond\nover\n", 0)
    writer.communicate(timeout=60)


def test_a_secret_in_two_chunks_is_not_printed_while_it_is_followed(tmp_path: Path) -> None:
    writer = program(tmp_path)
    follower = following(tmp_path, "draft")
    assert line_of(follower) == "first\n"
    half = len(SECRET) // 2
    for part in (f"raw:a {SECRET[:half]}\n", f"raw:{SECRET[half:]} b\n", "over\n"):
        give(writer, part)
        assert line_of(writer) == "written\n"
    rest, _ = follower.communicate(timeout=60)
    assert rest.startswith("a [redacted")
    assert rest.endswith(" bover\n")
    assert SECRET[half:] not in rest
    writer.communicate(timeout=60)


def test_following_ends_when_the_process_is_killed(tmp_path: Path) -> None:
    writer = program(tmp_path)
    follower = following(tmp_path, "draft")
    assert line_of(follower) == "first\n"
    writer.kill()
    writer.communicate()
    rest, notes = follower.communicate(timeout=60)
    assert (rest, follower.returncode) == ("", 1)
    assert "is not finished, and no process executes it" in notes


def test_ctrl_c_ends_following(tmp_path: Path) -> None:
    writer = program(tmp_path)
    follower = following(tmp_path, "draft")
    assert line_of(follower) == "first\n"
    follower.send_signal(signal.SIGINT)
    _, notes = follower.communicate(timeout=60)
    assert follower.returncode == 130
    assert "Traceback" not in notes
    writer.kill()
    writer.communicate()


def test_a_failed_run_ends_with_its_exit_code(tmp_path: Path, hive: Hive) -> None:
    @hive.step(max_attempts=1)
    async def draft() -> None:
        current().write("so far")
        raise ValueError("no further")

    @hive.workflow
    async def job() -> None:
        await draft()

    with pytest.raises(RunFailedError):
        hive.run_sync(job, run_id="r")
    done = logs(tmp_path, "--follow")
    assert (done.returncode, done.stdout) == (1, "==> draft <==\nso far\n")
    assert logs(tmp_path).returncode == 0
