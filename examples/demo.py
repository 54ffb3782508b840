"""Start a run, kill it with ``kill -9`` in the middle, start it again: nothing is done twice.

An architect, three concurrent developers and a reviewer, with a simulated model that takes a moment
to answer. The process is killed while two developers are still running; started again with the same
run id, it resumes there.
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
from typing import TYPE_CHECKING, TypeVar

from maestro_hive import Hive, current
from maestro_hive.maestro.state.events import StepCompleted

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")

#: Seconds that the simulated model takes for each question.
QUESTIONS = {"design": 0.3, "cart": 0.3, "search": 1.2, "payment": 1.2, "review": 0.3}
INTERRUPTED = ["payment", "search"]


# --- the program that is killed -------------------------------------------------------------------


def work(folder: Path) -> None:
    """Execute the run; every question to the simulated model is recorded in a file."""
    hive = Hive(folder / "state")
    asked: set[str] = set()

    async def ask_model(question: str) -> str:
        asked.add(question)
        with (folder / "questions.txt").open("a") as questions:
            questions.write(f"{question}\n")
        print(f"    {question:<8} asking the model, attempt {current().attempt} …", flush=True)
        await asyncio.sleep(QUESTIONS[question])
        return f"answer to {question}"

    async def show(question: str, result: Awaitable[T]) -> T:
        answer = await result
        if question not in asked:
            print(f"    {question:<8} completed, not called again: {answer}", flush=True)
        return answer

    @hive.step(persona="architect")
    async def design(feature: str) -> list[str]:
        await ask_model("design")
        return ["cart", "search", "payment"] if feature else []

    @hive.step(persona="developer", max_concurrency=3)
    async def implement(part: str) -> str:
        return await ask_model(part)

    @hive.step(persona="reviewer")
    async def review(parts: list[str]) -> str:
        return f"{await ask_model('review')}, of {len(parts)} parts"

    @hive.workflow
    async def build(feature: str) -> str:
        parts = await show("design", design(feature))
        made = await asyncio.gather(*(show(part, implement(part)) for part in parts))
        return await show("review", review(made))

    print(f"    result   {hive.run_sync(build, 'shop', run_id='demo')}", flush=True)


# --- the program that kills it --------------------------------------------------------------------


def questions_in(folder: Path) -> list[str]:
    """Return the questions to the simulated model so far."""
    recorded = folder / "questions.txt"
    return recorded.read_text().split() if recorded.exists() else []


async def steps_completed(folder: Path) -> int:
    """Return how many steps are completed, read from the journal."""
    async with Hive(folder / "state") as hive:
        events = [event async for event in hive.events("demo", follow=False)]
    return sum(isinstance(event, StepCompleted) for event in events)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the program as a process of its own."""
    return subprocess.Popen([sys.executable, __file__, str(folder)])


def kill_in_the_middle(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until one developer has completed and two have not, then kill the process."""
    for _ in range(1000):
        if (
            set(INTERRUPTED) <= set(questions_in(folder))
            and asyncio.run(steps_completed(folder)) == 2
        ):
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    """Run the demonstration; 0 if everything was executed as promised."""
    with tempfile.TemporaryDirectory(prefix="maestro-demo-") as name:
        folder = Path(name)
        print("Starting a run: an architect, three concurrent developers, a reviewer.")
        first = start(folder)
        kill_in_the_middle(first, folder)
        print(
            f"\nkill -9 of process {first.pid}, while {' and '.join(INTERRUPTED)} were running.\n"
        )
        print("Starting it again, with the same run id:")
        code = start(folder).wait()
        print("\nmaestro show demo:", flush=True)
        command = ["show", "demo", "--store", str(folder / "state")]
        subprocess.run([sys.executable, "-m", "maestro_hive", *command], check=False)
        asked = Counter(questions_in(folder))
    expected = {question: 1 + (question in INTERRUPTED) for question in QUESTIONS}
    good = code == 0 and asked == expected
    print(
        f"\n{len(QUESTIONS) - len(INTERRUPTED)} questions were asked once, the two interrupted ones twice."
    )
    print("No completed step was called again." if good else f"Unexpected calls: {dict(asked)}")
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) == 2:
        work(Path(sys.argv[1]))
    else:
        sys.exit(main())
