"""``IterativeExecutor``, for older programs: a façade over ``PersonaExecutor``."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.errors import ExecutionException
from maestro_hive.engine.settings import whole
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.process import run_async, threads
from maestro_hive.maestro.state import codec
from maestro_hive.unified_execution.persona_executor import PersonaExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.results import ExecutionAttempt


@dataclass(frozen=True, slots=True, kw_only=True)
class IterativeResult:
    """The outcome: the output, and one error for each iteration that failed."""

    success: bool
    output: Any = None
    errors: list[str] = field(default_factory=list)
    iterations: int = 0


class IterativeExecutor:
    """Calls a requirement, repeatedly, until it succeeds.

    A requirement is a function, or any value that ``worker`` is called with. The output is also
    written to ``output_dir``: a text as ``output.txt``, anything else as ``output.json``.
    """

    def __init__(
        self,
        output_dir: str | Path = "./output",
        max_iterations: int = 5,
        *,
        worker: Callable[..., object] | None = None,
    ) -> None:
        warnings.warn(
            "IterativeExecutor is deprecated: its progress is lost when the process is killed; use"
            " maestro_hive.unified_execution.PersonaExecutor with a workflow_id",
            DeprecationWarning,
            stacklevel=2,
        )
        self.output_dir = Path(output_dir)
        self.max_iterations = whole(1)("max_iterations", max_iterations)
        self._worker = worker

    def execute(self, requirement: object = None, **arguments: object) -> IterativeResult:
        """Return the outcome; called in an event loop, it blocks that loop."""
        work = self.execute_async(requirement, **arguments)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run_async(work)
        return threads.run(lambda: run_async(work)).result()

    async def execute_async(
        self, requirement: object = None, **arguments: object
    ) -> IterativeResult:
        """Return the outcome, without blocking the event loop."""
        task, given = self._task(requirement)
        executor = PersonaExecutor(persona_id="iterative").options(max_attempts=self.max_iterations)
        try:
            result = await executor.execute(task, "requirement", *given, **arguments)
        except ExecutionException as error:
            errors = _errors(executor.attempts) or [str(error)]
            return IterativeResult(success=False, errors=errors, iterations=len(executor.attempts))
        self._write(result.final_output)
        return IterativeResult(
            success=True,
            output=result.final_output,
            errors=_errors(result.attempts),
            iterations=result.attempt_count,
        )

    def _task(self, requirement: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self._worker is not None:
            return self._worker, (requirement,)
        if callable(requirement):
            return requirement, ()
        raise ConfigurationError(
            f"the requirement {requirement!r} is not a function; pass a function, or a worker= that"
            " is called with the requirement"
        )

    def _write(self, output: object) -> None:
        if output is None:
            return
        folder = files.make_private_folder(self.output_dir)
        if isinstance(output, str):
            files.write_atomically(folder / "output.txt", output.encode())
        else:
            files.write_atomically(folder / "output.json", codec.encode(output, "output").data)


def _errors(attempts: list[ExecutionAttempt]) -> list[str]:
    return [each.error_message for each in attempts if each.error_message is not None]
