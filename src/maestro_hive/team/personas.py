"""Who does the work of a task: a command, a Python function or an agent; and the command that decides.

Everything here is called inside of a step: what fails is retried by the engine, and the output of a
failed verification is in its error, which is the feedback for the next attempt.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from maestro_hive.engine.attempt import call_in_thread, is_async, is_from_a_signal
from maestro_hive.engine.context import current
from maestro_hive.engine.values import in_thread
from maestro_hive.hive.active_run import WorkflowStopped
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.kernel.redaction import cut, redact_text
from maestro_hive.team.agent_calls import AgentTask
from maestro_hive.team.errors import (
    CommandFailedError,
    GateFailedError,
    TooManyHandoversError,
    VerificationFailedError,
)
from maestro_hive.team.inputs import agent_persona, digests
from maestro_hive.team.processes import SHELL, Ended, LimitedLog, execute
from maestro_hive.team.progress import (
    CHECKPOINT,
    ContextFull,
    ProgressFile,
    as_checkpoint,
    handovers,
    one_more_handover,
    remove_whatever,
)
from maestro_hive.team.prompts import prompt_of, with_feedback
from maestro_hive.team.results import check_result, written_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from maestro_hive.engine.prices import Prices
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.agents import Command
    from maestro_hive.team.ownership import Ownership
    from maestro_hive.team.restoring import CheckpointFiles
    from maestro_hive.team.survivors import Survivors

#: How many seconds a persona and a verification, or a gate, have if the graph does not say.
TASK_SECONDS = 3600.0
CHECK_SECONDS = 600.0
#: How often a fresh worker goes on from a checkpoint in a run, if the graph does not say.
MAX_HANDOVERS = 10
_NO_PROGRESS = ", which means a full context, and saved no new progress to the file that MAESTRO_PROGRESS names"
_NO_QUESTION = (
    "it ended with exit code {}, which means that it needs something, and printed no question"
)
#: How many tasks an error names.
_NAMED = 8
#: How much is recorded of why a gate has not passed that is not required; its log has all of it.
_REASON_LENGTH = 2_000
#: What the system takes as one argument or variable at most is 128 KiB, with its end.
_MOST_ARGUMENT_BYTES = 128 * 1024 - 64
#: What a Python persona raises that is meant for more than its task.
_NOT_FAILURES = (asyncio.CancelledError, KeyboardInterrupt, WorkflowStopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a Python persona is called with; ``maestro_hive.current()`` has the rest."""

    #: The task's id and title.
    id: str
    title: str
    #: What it is told, without the feedback.
    prompt: str
    #: What failed before, a sentence for each attempt.
    feedback: tuple[str, ...]
    #: The files that it may write.
    files: tuple[str, ...]
    #: What the tasks that it depends on returned, by id; None of those that are commands.
    results: Mapping[str, Any]
    #: The folder it works in.
    folder: Path


class Limits(NamedTuple):
    """How long a persona may work, how often a fresh one may go on, and what an agent may spend."""

    seconds: float = TASK_SECONDS
    max_handovers: int = MAX_HANDOVERS
    budget_usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """Where the tasks of one run work, and who they are executed by."""

    run_id: str
    #: The folder they share.
    folder: Path
    survivors: Survivors
    #: Where commands save their progress, and where long texts for agents are.
    progress_folder: Path
    calls_folder: Path
    #: Which worker executes a task now.
    worker_of: Callable[[str], int]
    functions: dict[str, Callable[[Assignment], Any]] = field(default_factory=dict)
    #: What models cost, for agents that do not say it.
    prices: Prices | None = None
    #: The files of worker checkpoints, and those that the run was restored with.
    checkpoints: CheckpointFiles | None = None
    restored: Mapping[str, Json] = field(default_factory=dict)
    #: Folders that are no task's, such as the state folder, by their real paths.
    apart: frozenset[str] = frozenset()
    #: What checks that tasks write their own files only; None if no task declares any.
    ownership: Ownership | None = None

    async def work(self, given: dict[str, Json], results: dict[str, Json], limits: Limits) -> Json:
        """Do a task, verify it, and return its result: the digests of its files, and a value.

        A persona that needs something first has a result that asks for it, and is not verified.
        """
        saved = self.restored.get(given["id"])
        if saved is not None and CHECKPOINT not in current().progress:
            current().save_progress(**{CHECKPOINT: saved})
        async with self._writing(given["id"]):
            value, asked = await self._persona(given, results, limits)
        if asked is not None:
            return {"asks": asked}
        schema = given.get("output_schema")
        if schema is not None:
            await in_thread(partial(check_result, value, schema))
        check = given.get("verification")
        if check is not None:
            async with self._writing(None):
                await self._verify(given["id"], check)
        paths = given["files"]
        made = await in_thread(partial(digests, self.folder, paths, self.apart)) if paths else {}
        if self.checkpoints is not None:
            self.checkpoints.remove(given["id"])
        if "command" in given["persona"]:
            self._progress_of(given).remove()
            remove_whatever(self._result_of(given))
        if "agent" in given["persona"]:
            shutil.rmtree(self.calls_folder / given["id"], ignore_errors=True)
        return {"files": made} if value is None else {"files": made, "value": value}

    def _writing(self, task: str | None) -> AbstractAsyncContextManager[None]:
        """Return what a task writes its files in, or something else all files."""
        if self.ownership is None:
            return nullcontext()
        return self.ownership.unchecked() if task is None else self.ownership.working(task)

    async def _persona(
        self, given: dict[str, Json], results: dict[str, Json], limits: Limits
    ) -> tuple[Json, str | None]:
        """Let the persona work; return its value, and what it asks for."""
        if "python" in given["persona"]:
            return await self._python(given, results, limits), None
        if "agent" in given["persona"]:
            return await self._agent(given, limits), None
        if "output_schema" not in given:
            return None, await self._command(given, limits)
        path = self._result_of(given)
        remove_whatever(path)  # of an attempt that failed
        asked = await self._command(given, limits)
        return (written_result(path) if asked is None else None), asked

    def _result_of(self, given: dict[str, Json]) -> Path:
        """Return the file that a command writes its result to, if one is asked for."""
        return self.progress_folder / f"{given['id']}.result.json"

    async def _command(self, given: dict[str, Json], limits: Limits) -> str | None:
        """Execute a persona's command; its exit code is its word. Return what it asks for, if anything."""
        progress = self._progress_of(given)
        progress.offer(current().progress.get(CHECKPOINT))
        log = LimitedLog(current().write)
        while True:
            work = self._run_command(given, progress, log)
            try:
                ended = await _in_time(work, limits.seconds, "the persona")
            except BaseException:
                with suppress(MaestroError):  # that it was ended counts
                    self._save(given["id"], progress.taken())
                raise
            is_saved = self._save(given["id"], progress.taken(), is_full=ended.code == 2)
            match ended.code:
                case 0:
                    return None
                case 2 if is_saved:  # other programs end so because they were called wrongly
                    _check_handovers(limits)
                    current().write("the context is full: a fresh worker goes on\n")
                case 3 | 4:
                    return ended.tail.rpartition("\n")[2] or _NO_QUESTION.format(ended.code)
                case code:
                    why = _NO_PROGRESS if code == 2 else ""
                    raise CommandFailedError(f"the persona's command {ended}{why}{_shown(ended)}")

    def _progress_of(self, given: dict[str, Json]) -> ProgressFile:
        return ProgressFile(self.progress_folder / f"{given['id']}.json", current().write)

    async def _python(
        self, given: dict[str, Json], results: dict[str, Json], limits: Limits
    ) -> Any:
        """Call a Python persona, and again as often as its context is full."""
        while True:
            before = dict(current().progress)
            # A task of its own: one that cancels the task that executes it has failed, and not the run.
            work = asyncio.Task(self._call(given, results))
            try:
                return await _in_time(work, limits.seconds, "the persona")
            except ContextFull as full:
                if not full.fields and before == current().progress:
                    raise CommandFailedError(
                        "the persona raised ContextFull and saved no progress, so a fresh one would start"
                        " where it did; give it what was done, as in ContextFull(current_step=2)"
                    ) from full
                self._save(given["id"], full.fields, is_full=True)
            _check_handovers(limits)

    async def _agent(self, given: dict[str, Json], limits: Limits) -> Json:
        """Call an agent, and again in a fresh session as often as its context is full."""
        work = AgentTask(
            agent_persona(given["persona"]),
            prompt=prompt_of(given),
            folder=self.calls_folder / given["id"],
            execute=partial(self._run_agent, given["id"]),
            budget_usd=limits.budget_usd,
            prices=self.prices,
            schema=given.get("output_schema"),
        )
        while True:
            said: Json = await _in_time(work.call(), limits.seconds, "the agent")
            if said is not None:
                return said
            _check_handovers(limits)
            current().write("the context is full: a fresh session goes on\n")

    async def _run_agent(self, task: str, command: Command, write: Callable[[str], None]) -> Ended:
        return await execute(
            command.argv,
            folder=self.folder,
            environment={**self._environment(task), **command.environment},
            survivors=self.survivors,
            text=command.stdin,
            write=write,
        )

    def _save(self, task: str, saved: Json, *, is_full: bool = False) -> bool:
        """Record a checkpoint, with the count of full contexts; return whether there is one."""
        if saved is None:
            return False
        worker, now = str(self.worker_of(task)), SystemClock().now()
        checkpoint = as_checkpoint(saved, task=task, worker=worker, now=now)
        counted = one_more_handover(current().progress) if is_full else {}
        current().save_progress(**{CHECKPOINT: checkpoint}, **counted)
        if self.checkpoints is not None:
            self.checkpoints.write(task, checkpoint)
        return True

    async def check_gate(self, given: dict[str, Json], seconds: float) -> Literal[True] | str:
        """Return True if a gate has passed, or why not; one that is required and has not raises."""
        try:
            async with self._writing(None):
                work = self._shell(given["command"], given["gate"])
                ended = await _in_time(work, seconds, f"gate {given['gate']!r}")
        except TimeoutError as error:
            reason = str(error)
        else:
            if not ended.code:
                return True
            reason = f"gate {given['gate']!r} {ended}{_shown(ended)}"
        if given["required"]:
            raise GateFailedError(reason)
        return cut(redact_text(reason), _REASON_LENGTH)

    async def _verify(self, task: str, check: dict[str, Json]) -> None:
        seconds = check.get("timeout_seconds") or CHECK_SECONDS
        sought = _Sought(check.get("expected") or "", LimitedLog(current().write).write)
        try:
            work = self._shell(check["command"], task, sought.write)
            ended = await _in_time(work, seconds, "the verification")
        except TimeoutError as error:  # which would speak against the persona's provider
            raise _not_verified(check, str(error)) from None
        if ended.code:
            raise _not_verified(check, f"the verification {ended}", _shown(ended))
        if not sought.is_found:
            reason = "the verification succeeded, and its output does not contain what is expected"
            raise _not_verified(check, reason, _shown(ended))

    async def _shell(
        self, command: str, name: str, write: Callable[[str], None] | None = None
    ) -> Ended:
        write = write or LimitedLog(current().write).write
        write(f"$ {command}\n")
        return await execute(
            [SHELL, "-c", command],
            folder=self.folder,
            environment=self._environment(name),
            survivors=self.survivors,
            write=write,
        )

    async def _run_command(
        self, given: dict[str, Json], progress: ProgressFile, log: LimitedLog
    ) -> Ended:
        context = current()
        prompt = with_feedback(prompt_of(given), context.feedback).replace("\0", "")
        arguments = [each.replace("{prompt}", prompt) for each in given["persona"]["command"]]
        longest = max(len(each.encode("utf-8", "replace")) for each in arguments)
        if longest > _MOST_ARGUMENT_BYTES:
            raise ConfigurationError(
                f"the prompt of {given['id']} has {longest:,} bytes, more than an argument of a command"
                " may have; leave {prompt} out: the command gets it on its standard input, too"
            )
        return await execute(
            arguments,
            folder=self.folder,
            environment={
                **self._environment(given["id"]),
                "MAESTRO_PROGRESS": str(progress.path),
                "MAESTRO_RESULT": str(self._result_of(given)),
            },
            survivors=self.survivors,
            text=prompt,
            write=log.write,
        )

    async def _call(self, given: dict[str, Json], results: dict[str, Json]) -> Any:
        call = Assignment(
            id=given["id"],
            title=given["title"],
            prompt=prompt_of(given),
            feedback=tuple(current().feedback),
            files=tuple(given["files"]),
            results={each: result.get("value") for each, result in results.items()},
            folder=self.folder,
        )
        function, own_task = self.functions[given["persona"]["python"]], asyncio.current_task()
        try:
            if is_async(function):
                return await function(call)
            return await call_in_thread(partial(_called, function), (call,), {}, current())
        except GeneratorExit as error:
            if own_task is not _current_task():
                raise  # this call is being closed
            raise _failed(error) from error
        except (Exception, *_NOT_FAILURES):
            raise
        except BaseException as error:
            if is_from_a_signal(error):
                raise
            raise _failed(error) from error

    def _environment(self, name: str) -> dict[str, str]:
        """Return what a command finds in its environment."""
        context = current()
        feedback = "\n\n".join(context.feedback).replace("\0", "")
        while len(feedback.encode("utf-8", "replace")) > _MOST_ARGUMENT_BYTES:
            feedback = feedback[len(feedback) // 2 :]  # the last attempts are the ones that count
        return {
            **os.environ,
            "MAESTRO_RUN_ID": self.run_id,
            "MAESTRO_TASK_ID": name,
            "MAESTRO_WORKER_ID": str(self.worker_of(context.task_name)),
            "MAESTRO_ATTEMPT": str(context.attempt),
            "MAESTRO_EFFECT_KEY": context.effect_key,
            "MAESTRO_FEEDBACK": feedback,
        }


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # the loop has ended
        return None


def _called(function: Callable[[Assignment], Any], call: Assignment) -> Any:
    """Call a function in a thread of its own, which nobody stops: what it raises is its failure."""
    try:
        return function(call)
    except Exception:
        raise
    except BaseException as error:
        raise _failed(error) from error


def _failed(error: BaseException) -> CommandFailedError:
    """Return the failure that an error is, as of ``sys.exit``: the task failed, and not the process."""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return CommandFailedError(f"the persona raised {said}")


class _Sought:
    """A text that an output has to contain, in one line or over several; looks at each piece of it."""

    def __init__(self, text: str, write: Callable[[str], None]) -> None:
        self._text = text.strip()
        self._write = write
        self._end = ""
        self.is_found = not self._text

    def write(self, piece: str) -> None:
        """Look at a piece, and pass it on."""
        if not self.is_found:
            seen = self._end + piece
            self.is_found = self._text in seen
            self._end = seen[-len(self._text) :]
        self._write(piece)


async def _in_time(work: Any, seconds: float, who: str) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise  # its own
        took, thread = f"{who} took longer than {seconds:g} s", current().thread
        if thread is not None and not thread.done():
            raise TimeoutError(
                f"{took}; its function goes on in a thread, which nothing can end: its worker is busy"
                " until then, and what it returns is not used"
            ) from None
        raise TimeoutError(f"{took}, and was ended") from None


def _not_verified(check: dict[str, Json], what: str, output: str = "") -> VerificationFailedError:
    expected = f"\nexpected: {check['expected']}" if check.get("expected") else ""
    return VerificationFailedError(f"{what}: {check['command']}{expected}{output}", "TEST_FAILURE")


def _check_handovers(limits: Limits) -> None:
    """Raise if no fresh worker may go on any more, in this run."""
    if (times := handovers(current().progress)) > limits.max_handovers:
        raise TooManyHandoversError(
            f"the context was full {times} times, and the limit of fresh workers is"
            f" {limits.max_handovers}; divide the task, or set max_handovers"
        )


def _shown(ended: Ended) -> str:
    return f"\n{ended.tail}" if ended.tail else ", and printed nothing"
