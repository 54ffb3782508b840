"""Signals belong to the program: only ``run_sync`` handles them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.journal.entries import AttemptFailed, AttemptStarted, OfStep
from tests.hive.conftest import entries_of, quick_hive, recorded, status
from tests.hive.test_kills import has_printed, printed, program  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.hive.hive import Hive

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def handlers() -> list[Any]:
    """Return what this process does at each of the signals."""
    return [signal.getsignal(each) for each in SIGNALS]


@pytest.fixture
def own_handlers() -> Iterator[list[Any]]:
    """Give the process handlers of its own, as a server does."""
    before = {each: signal.signal(each, lambda *_: None) for each in SIGNALS}
    yield handlers()
    for each, handler in before.items():
        signal.signal(each, handler)


class Workflow:
    """A workflow with one step, which notes the signal handlers while it is executed."""

    def __init__(self, hive: Hive) -> None:
        self.seen: list[list[Any]] = []

        @hive.step
        async def look() -> str:
            self.seen.append(handlers())
            await asyncio.sleep(0)
            self.seen.append(handlers())
            return "looked"

        @hive.workflow
        async def work() -> str:
            self.seen.append(handlers())
            return await look()

        self.work = work


def test_awaited_runs_touch_no_signal(hive: Hive, own_handlers: list[Any]) -> None:
    workflow = Workflow(hive)

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, workflow.seen.clear)
        expected = handlers()
        assert await hive.run(workflow.work, run_id="run") == "looked"
        started = await hive.start(workflow.work, run_id="start")
        assert await started.result() == "looked"
        hive.fork("run", from_step="look", new_run_id="resumed")
        assert await hive.resume("resumed") == "looked"
        assert workflow.seen == [expected] * 9
        assert handlers() == expected

    with asyncio.Runner() as runner:
        runner.run(main())
    assert handlers()[0] == own_handlers[0]


def test_run_sync_handles_signals_and_restores_the_handlers(
    hive: Hive, own_handlers: list[Any]
) -> None:
    workflow = Workflow(hive)
    assert hive.run_sync(workflow.work) == "looked"
    assert all(each not in own_handlers for each in workflow.seen[0])
    assert handlers() == own_handlers


def test_run_sync_restores_the_handlers_after_a_stop(hive: Hive, own_handlers: list[Any]) -> None:
    @hive.step
    async def stopped() -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60)

    @hive.workflow
    async def work() -> None:
        await stopped()

    with pytest.raises(SystemExit) as caught:
        hive.run_sync(work, run_id="r")
    assert caught.value.code == 143
    assert handlers() == own_handlers
    assert status(hive) == "stopped"


def test_run_sync_in_another_thread_touches_no_signal(hive: Hive, own_handlers: list[Any]) -> None:
    workflow = Workflow(hive)
    thread = threading.Thread(target=hive.run_sync, args=(workflow.work,))
    thread.start()
    thread.join()
    assert workflow.seen == [own_handlers] * 3


def test_a_cancelled_run_is_a_polite_stop(hive: Hive) -> None:
    started = asyncio.Event()
    attempts: list[int] = []

    @hive.step
    async def slow() -> str:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            started.set()
            await asyncio.sleep(60)
        return "done"

    @hive.workflow
    async def work() -> str:
        return await slow()

    async def main() -> None:
        running = asyncio.create_task(hive.run(work, run_id="r"))
        await started.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert running.cancelled()
        last = (await entries_of(hive))[-1]
        assert isinstance(last, AttemptFailed)
        assert last.status == "stopped"
        assert status(hive) == "stopped"
        assert await hive.run(work, run_id="r") == "done"

    asyncio.run(main())
    assert len(attempts) == 2


_HANDLER = """
    import signal

    @hive.step
    async def slow():
        say("started")
        while not heard:
            await asyncio.sleep(0.005)
        return "done"

    @hive.workflow
    async def work():
        return await slow()

    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    print(asyncio.run(hive.run(work, run_id="r")), heard, flush=True)
"""


def test_a_program_keeps_its_own_sigterm_handler_while_a_run_is_awaited(
    tmp_path: Path,
    program: Any,  # noqa: F811 - the fixture
) -> None:
    child = program(_HANDLER)
    child.wait_for(has_printed(tmp_path, "started"))
    child.process.send_signal(signal.SIGTERM)
    assert child.end() == (0, "done [15]\n", "")


_SERVER = """
    import signal

    @hive.step
    async def slow():
        say("started")
        await asyncio.sleep(float(sys.argv[2]))
        return "done"

    @hive.workflow
    async def work():
        return await slow()

    async def answer(reader, writer):
        await reader.readline()
        try:
            writer.write((await hive.run(work, run_id="r")).encode())
        finally:
            say("answered")
            writer.close()

    async def main():
        stopped, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        requests = set()

        def accept(reader, writer):
            requests.add(asyncio.create_task(answer(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        say("port", server.sockets[0].getsockname()[1])
        await stopped.wait()
        server.close()
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        print("shut down", flush=True)

    asyncio.run(main())
    hive.close()
"""


def test_a_server_shuts_down_by_itself_at_sigterm_and_its_run_resumes(
    tmp_path: Path,
    program: Any,  # noqa: F811 - the fixture
) -> None:
    child = program(_SERVER, "60")
    child.wait_for(has_printed(tmp_path, "port"))
    with socket.create_connection(("127.0.0.1", int(printed(tmp_path)[0][1]))) as request:
        request.sendall(b"go\n")
        child.wait_for(has_printed(tmp_path, "started"))
        child.process.send_signal(signal.SIGTERM)
        assert child.end() == (0, "shut down\n", "")
    assert printed(tmp_path)[-1] == ["answered"]
    with quick_hive(tmp_path / "state") as hive:
        assert status(hive) == "stopped"

        @hive.step
        async def slow() -> str:
            return "done"

        @hive.workflow
        async def work() -> str:
            return await slow()

        assert hive.run_sync(work, run_id="r") == "done"


def test_a_run_that_waits_when_its_loop_ends_still_waits(hive: Hive) -> None:
    @hive.workflow
    async def asks() -> None:
        await hive.wait_for("colour")

    async def main() -> None:
        await hive.start(asks, run_id="r")
        async with asyncio.timeout(30):
            while not hive.questions("r"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(hive.questions("r")) == 1
    assert {each.status for each in hive.runs()} == {"waiting"}


_STARTS_A_PROGRAM = """
    import os
    import subprocess

    os.setpgid(0, 0)  # as a shell does: Ctrl+C is for the whole group
    command = ["sh", "-c", f"echo $$ > {folder}/new && mv {folder}/new {folder}/pid; exec sleep 60"]

    def work():
        ended = subprocess.run(command, check=sys.argv[2] == "checked")
        return ended.returncode

    async def work_async():
        program = await asyncio.create_subprocess_exec(*command)
        code = await program.wait()
        if sys.argv[2] == "checked":
            raise RuntimeError(code)
        return code

    step = hive.step(work if sys.argv[3] == "sync" else work_async)

    def block():
        # Both are there when the loop continues: the signal, and the end of the program.
        if not (folder / "pid").exists():
            return asyncio.get_running_loop().call_later(0.02, block)
        (folder / "blocked").touch()
        time.sleep(0.5)

    @hive.workflow
    async def build():
        asyncio.get_running_loop().call_soon(block)
        return await step()

    hive.run_sync(build, run_id="r")
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("how", ["checked", "unchecked"])
def test_what_a_program_of_a_step_returns_after_ctrl_c_is_no_outcome(
    tmp_path: Path,
    program: Any,  # noqa: F811
    how: str,
    kind: str,
) -> None:
    """A terminal interrupts all processes that it shows, also those that a step has started."""
    started = program(_STARTS_A_PROGRAM, how, kind)
    started.wait_for((tmp_path / "blocked").exists)
    os.killpg(os.getpgid(int((tmp_path / "pid").read_text())), signal.SIGINT)
    assert started.end()[0] == -signal.SIGINT
    with quick_hive(tmp_path / "state") as hive:
        start, end = (each for each in recorded(hive) if isinstance(each, OfStep))
    assert isinstance(start, AttemptStarted)
    assert isinstance(end, AttemptFailed)
    assert end.status == "stopped"
