"""Tasks that fail as they are told, for tests of level 2."""

from __future__ import annotations

from typing import Any

from maestro_hive.engine.context import round_number


class Task:
    """Fails as it is told: with each error in turn, and then returns."""

    def __init__(self, *errors: BaseException, output: object = "done") -> None:
        self.errors = list(errors)
        self.output = output
        self.calls: list[tuple[Any, ...]] = []
        self.rounds: list[int] = []

    async def __call__(self, *args: Any, **kwargs: Any) -> object:
        self.calls.append((*args, *kwargs.items()))
        self.rounds.append(round_number.get())
        if self.errors:
            raise self.errors.pop(0)
        return self.output


def failing(times: int = 99) -> Task:
    return Task(*(RuntimeError(f"no {number}") for number in range(1, times + 1)))
