"""A process of many that spend from one budget: ``python -m tests.crash.budget_program FOLDER RUN``.

With a number it hangs in that call of its step, with what it has reserved, until it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

from maestro_hive import BudgetExceeded, Hive

TOKENS, LIMIT = 7, 1_000
PARTS, STEPS = 4, 5
BANKRUPT = 3


def program(hive: Hive, hang_in: int = 0) -> Any:
    """Return a workflow: each of its children makes a few steps, one of them two at once."""
    calls = itertools.count(1)

    @hive.step(persona="spender", max_tokens=TOKENS)
    async def spend(number: int) -> dict[str, int]:
        await asyncio.sleep(0.01)
        if next(calls) == hang_in:
            print("hangs", flush=True)  # noqa: T201 - for the test
            await asyncio.Event().wait()
        return {"number": number, "tokens_used": TOKENS}

    @hive.workflow
    async def part(number: int) -> int:
        first = await asyncio.gather(spend(10 * number), spend(10 * number + 1))
        rest = [await spend(10 * number + each) for each in range(2, STEPS)]
        return len(first) + len(rest)

    @hive.workflow
    async def whole() -> int:
        return sum([await part(number) for number in range(PARTS)])

    return whole


def main() -> int:
    """Run it when told so; return how it ended."""
    folder, run_id, *hang_in = sys.argv[1:]
    with Hive(folder) as hive:
        whole = program(hive, *map(int, hang_in))
        hive.runs(limit=1)
        print("ready", flush=True)  # noqa: T201 - for the test
        sys.stdin.readline()
        try:
            hive.run_sync(whole, run_id=run_id)
        except BudgetExceeded:
            return BANKRUPT
    return 0


if __name__ == "__main__":
    sys.exit(main())
