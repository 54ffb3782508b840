"""A command of the user's: what it gets, what it prints, and that it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from maestro_hive.engine.tickets import Ticket, TicketRefusedError, TicketUnknownError
from tests.tickets.cases import LABEL, a_case, system
from tests.timing import wait_until

run = asyncio.run


def command(script: str, *arguments: str, **settings: Any) -> Any:
    return system(escalation_command=["/bin/sh", "-c", script, "sh", *arguments], **settings)


def test_it_gets_the_failure_and_prints_the_key(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    tickets = command('cat > "$1"; echo "  OPS-7 "; echo https://x.example/7', str(told))
    made = run(tickets.create(a_case()))
    assert made == Ticket(key="OPS-7", address="https://x.example/7")
    message = json.loads(told.read_text())
    assert (message["event"], message["label"]) == ("escalation", LABEL)
    assert message["effect_key"] == "effect-1"


def test_no_shell_reads_its_arguments(tmp_path: Path) -> None:
    wanted = "$(touch surprise); `x` 'y'"
    program = "import sys; print(sys.argv[1])"
    tickets = system(escalation_command=[sys.executable, "-S", "-c", program, wanted])
    assert run(tickets.create(a_case())).key == wanted


def test_a_variable_is_split_into_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAESTRO_ESCALATION_COMMAND", "/bin/sh -c 'echo A-1'")
    assert run(system().create(a_case())).key == "A-1"


def test_it_need_not_read_and_may_print_a_lot() -> None:
    script = "echo A-1; i=0; while [ $i -lt 3000 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done"
    assert run(command(script).create(a_case(description="x" * 300_000))).key == "A-1"


def test_an_exit_code_means_that_nothing_was_made() -> None:
    with pytest.raises(TicketRefusedError, match="ended with 3: no network") as caught:
        run(command("echo no network >&2; exit 3").create(a_case()))
    assert not caught.value.permanent
    assert caught.value.retry_after is None


@pytest.mark.parametrize("script, said", [("true", "printed nothing"), ("kill -9 $$", "signal 9")])
def test_what_it_made_is_not_known(script: str, said: str) -> None:
    with pytest.raises(TicketUnknownError, match=said):
        run(command(script).create(a_case()))


def test_a_program_that_does_not_exist_is_named() -> None:
    with pytest.raises(TicketRefusedError, match="/no/such cannot be started") as caught:
        run(system(escalation_command=["/no/such", "s3cret"]).create(a_case()))
    assert caught.value.permanent
    assert "s3cret" not in str(caught.value)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


STUBBORN = "trap '' TERM; sleep 600 & echo $! > \"$1\"; echo A-1; wait; wait"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_of_it_is_killed_when_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maestro_hive.engine.tickets.command._GRACE", 0.05)
    child = tmp_path / "child"
    tickets = command(STUBBORN, str(child), escalation_command_timeout_seconds=0.5)
    with pytest.raises(TicketUnknownError, match=r"did not end in 0\.5 seconds and was killed"):
        run(tickets.create(a_case()))
    if child.exists() and child.read_text().strip():  # a busy machine may not have started it
        wait_until(lambda: not is_alive(int(child.read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_of_it_is_killed_when_it_is_cancelled(tmp_path: Path) -> None:
    child = tmp_path / "child"

    async def cancelled() -> None:
        task = asyncio.ensure_future(
            command('sleep 600 & echo $! > "$1"; wait', str(child)).create(a_case())
        )
        await asyncio.to_thread(
            wait_until, lambda: child.exists() and child.read_text().endswith("\n")
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())
    wait_until(lambda: not is_alive(int(child.read_text())))


def test_what_it_leaves_behind_delays_nothing(tmp_path: Path) -> None:
    child = tmp_path / "child"
    assert (
        run(command('sleep 600 & echo $! > "$1"; echo A-1', str(child)).create(a_case())).key
        == "A-1"
    )
    os.kill(int(child.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("pauses", range(4))
def test_it_can_be_cancelled_at_any_moment(pauses: int) -> None:
    async def cancelled() -> None:
        task = asyncio.ensure_future(command("sleep 600").create(a_case()))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())


def test_it_cannot_be_asked() -> None:
    tickets = command("true")
    assert not tickets.finds
    with pytest.raises(TicketRefusedError, match="cannot be searched"):
        run(tickets.find(LABEL))
