"""Start work, kill it with ``kill -9`` in the middle, start it again: nothing is done twice.

Six pretended model calls of a third of a second each. The worker is killed during the fourth;
started again with the same workflow id, it goes on there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from maestro_hive import ExecutionConfig, PersonaExecutor, current

TASKS = ["plan", "design", "write-tests", "implement", "review", "release"]
KILLED_DURING = "implement"


def worker(folder: Path) -> None:
    """Do what is not done yet; every call to the pretended model is noted in a file."""

    def ask_model(question: str) -> str:
        with (folder / "calls.txt").open("a") as calls:
            calls.write(f"{question}\n")
        print(f"    {question:<12} calling the model, attempt {current().attempt} …", flush=True)
        time.sleep(0.3)
        return f"answer to {question}"

    async def work() -> None:
        config = ExecutionConfig.in_folder(folder / "state")
        with PersonaExecutor(config, "writer", workflow_id="demo") as writer:
            for task in TASKS:
                calls = len(called(folder))
                result = await writer.execute(ask_model, task, task)
                if len(called(folder)) == calls:
                    print(
                        f"    {task:<12} kept, not called again: {result.final_output}", flush=True
                    )

    asyncio.run(work())


def called(folder: Path) -> list[str]:
    """Return what the pretended model was asked so far."""
    calls = folder / "calls.txt"
    return calls.read_text().split() if calls.exists() else []


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the worker as a process of its own."""
    return subprocess.Popen([sys.executable, __file__, str(folder)])


def kill_in_the_middle(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the worker is inside the fourth call, then end it without a word."""
    for _ in range(1000):
        if KILLED_DURING in called(folder):
            break
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Run the demonstration; 0 if everything was done exactly as promised."""
    with tempfile.TemporaryDirectory(prefix="maestro-demo-") as name:
        folder = Path(name)
        print("Starting a run of six tasks:")
        first = start(folder)
        kill_in_the_middle(first, folder)
        print(f"\nkill -9 of process {first.pid}, in the middle of '{KILLED_DURING}'.\n")
        print("Starting it again, with the same workflow id:")
        code = start(folder).wait()
        calls = Counter(called(folder))
    finished = [task for task in TASKS if task != KILLED_DURING]
    good = code == 0 and all(calls[task] == 1 for task in finished) and calls[KILLED_DURING] == 2
    print(f"\n{len(finished)} tasks were called once, and '{KILLED_DURING}', cut off, once more.")
    print("What was finished stayed finished." if good else f"That is not so: {dict(calls)}")
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) == 2:
        worker(Path(sys.argv[1]))
    else:
        sys.exit(main())
