"""Start work, kill it with ``kill -9`` in the middle, start it again: nothing is done twice.

Six pretended model calls of a third of a second each. The worker is killed during the fourth;
started again with the same workflow id, it goes on there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from maestro_hive.unified_execution import ExecutionConfig, StateConfig, StatePersistence

TASKS = ["plan", "design", "write-tests", "implement", "review", "release"]
KILLED_DURING = "implement"


def worker(folder: Path) -> None:
    """Do what is not done yet; every call to the pretended model is noted in a file."""
    config = ExecutionConfig(
        state=StateConfig(
            state_dir=str(folder / "state"), checkpoint_dir=str(folder / "checkpoints")
        )
    )
    with StatePersistence(config, workflow_id="demo") as run:
        done = set(run.state.completed_tasks)
        for task in TASKS:
            if task in done:
                print(f"    {task:<12} kept, not called again", flush=True)
                continue
            with (folder / "calls.txt").open("a") as calls:
                calls.write(f"{task}\n")
            print(f"    {task:<12} calling the model …", flush=True)
            time.sleep(0.3)
            run.mark_task_completed(task, {task: f"answer to {task}"})


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the worker as a process of its own."""
    return subprocess.Popen([sys.executable, __file__, str(folder)])


def kill_in_the_middle(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the worker is inside the fourth call, then end it without a word."""
    calls = folder / "calls.txt"
    for _ in range(1000):
        if calls.exists() and KILLED_DURING in calls.read_text():
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
        calls = Counter((folder / "calls.txt").read_text().split())
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
