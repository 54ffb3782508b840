"""The stage between two attempts: a failure is diagnosed, healers are asked, and repairs are judged.

The order is that of the records, so that a kill between two of them loses nothing: the failed attempt
with its diagnosis; what files were, before they are changed; the repair; after the next attempt, the
verdict. What was recorded is not done again; what was not is, at the next start (``continue_healing``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.errors import text_of
from maestro_hive.engine.failures import attempt_line, plain_text
from maestro_hive.engine.healing.arguments import (
    ChangedArguments,
    arguments_by_name,
    encode_arguments,
    with_changes,
)
from maestro_hive.engine.healing.calls import UserCallError, called
from maestro_hive.engine.healing.failure import (
    Fix,
    HealingResult,
    HealingStatus,
    failure_of_error,
    recorded_failure,
)
from maestro_hive.engine.healing.function_healers import checked_fix
from maestro_hive.engine.healing.healers import DEFAULT_HEALERS, name_of
from maestro_hive.engine.healing.repairs import (
    FAILED,
    INTERRUPTED,
    UNDECIDED,
    Repair,
    Verdict,
    verdict_of,
)
from maestro_hive.engine.healing.workspace import Turn, Workspace
from maestro_hive.engine.recorded_errors import error_from
from maestro_hive.engine.settings import refused
from maestro_hive.engine.values import in_thread
from maestro_hive.kernel.redaction import cut

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.engine.healing.engine import SelfHealingEngine
    from maestro_hive.engine.healing.failure import Failure
    from maestro_hive.engine.healing.healers import Healer
    from maestro_hive.engine.healing.workspace import FileBefore
    from maestro_hive.engine.step import StepExecution
    from maestro_hive.engine.step_spec import StepSpec
    from maestro_hive.maestro.state.codec import Encoded


#: All changed arguments of a step by name, and as they are recorded.
NewArguments: TypeAlias = "tuple[dict[str, Any], Encoded | None]"

#: How much of an engine's feedback, of its fix, or of its own error, is recorded.
_MAX_TEXT = 2_000


class HealingEngine(Protocol):
    """Examines a failure, and may repair its cause or say what the next attempt should know."""

    def heal_single(self, failure: Failure) -> Any:
        """Return an object with a ``status``, where FIXED means that the cause is repaired.

        If it has a text as ``feedback``, the next attempts find it in ``current().feedback``. If its
        ``fix`` has ``arguments``, by name, and it is FIXED, the next attempts are called with them.
        """
        ...


class Tried(NamedTuple):
    """What is recorded of asking the healers about a failure."""

    facts: dict[str, Any]
    #: All changed arguments of the step, and as they are recorded.
    changed: Mapping[str, Any] | None = None
    encoded: Encoded | None = None


# --- what failed -----------------------------------------------------------------------------------


def diagnose(step: StepExecution, error: Exception, facts: Mapping[str, Any]) -> Failure | None:
    """Return a failed attempt as a failure, if healers are to be asked about it."""
    spec = step.spec
    if not spec.heals:
        return None
    number, _ = step.record.started_attempt()
    try:
        made = failure_of_error(
            error,
            failure_id=f"{step.record.effect_key}.{number}",
            source="execution",
            context={"error_category": facts["category"]},
            root=_engine(spec).workspace.root,  # so that it is the same failure on any machine
            trace=facts["traceback"],
        )
    except Exception:  # noqa: BLE001 - an error of the user's making, which cannot be read
        return None
    return made if _is_foreign(spec) or _healers_for(spec, made) else None


async def _add_context(step: StepExecution, failure: Failure) -> None:
    """Tell healers about the step, and about what was tried."""
    record = step.record
    number, _ = record.started_attempt()
    fingerprint = failure.get_hash()
    tried = record.tried_repairs(fingerprint)
    failure.context.update(
        persona=step.spec.persona,
        task_name=step.name,
        run_id=record.run_id,
        attempt=number,
        attempts=[attempt_line(each) for each in record.attempts()],
        arguments=arguments_by_name(step.task, *await step.arguments_of_attempt()),
        repairs=tried,
        tried=[each.healer for each in tried if each.is_same_failure],
        worked_before=record.worked_before(fingerprint),
    )


# --- who is asked ----------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _shipped(workspace: Path | None) -> SelfHealingEngine:
    """Return the engine of steps that were given none: it has the healers that ship."""
    from maestro_hive.engine.healing.engine import SelfHealingEngine

    return SelfHealingEngine(workspace, jira_fallback=False)


def _engine(spec: StepSpec) -> SelfHealingEngine:
    """Return the engine whose healers, workspace and rules are used."""
    from maestro_hive.engine.healing.engine import SelfHealingEngine

    own = spec.healer
    return own if isinstance(own, SelfHealingEngine) else _shipped(spec.workspace)


def _is_foreign(spec: StepSpec) -> bool:
    return spec.healer is not None and _engine(spec) is not spec.healer


def _healers_for(spec: StepSpec, failure: Failure) -> list[Healer]:
    """Return the healers to ask about a failure, in order."""
    from maestro_hive.engine.healing.engine import ranked

    engine = _engine(spec)
    known = [*spec.healers, *(() if _is_foreign(spec) else engine.healers)]
    enabled = [each for each in known if name_of(each) not in spec.disabled_healers]
    return ranked(failure, enabled)[: engine.max_retries + len(spec.healers)]


def check_disabled(
    names: Iterable[str], own: HealingEngine | None, healers: Iterable[Healer], where: str = ""
) -> None:
    """Raise if a healer that shall not be asked does not exist; an engine of the user's is not known."""
    from maestro_hive.engine.healing.engine import SelfHealingEngine

    if own is not None and not isinstance(own, SelfHealingEngine):
        return
    more = DEFAULT_HEALERS if own is None else own.healers
    known = [name_of(each) for each in (*healers, *more)]
    for name in sorted(names):
        if name not in known:
            wanted = f"names of healers: {', '.join(known)}"
            raise refused(f"{where}disabled_healers", name, wanted)


# --- healing ---------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A fix that is used, with the arguments that the next attempts get by it."""

    fix: Fix
    status: HealingStatus
    arguments: NewArguments | None = None


async def heal(step: StepExecution, failure: Failure) -> None:
    """Ask healers about a failure that is recorded, and record what the next attempt gets."""
    await _add_context(step, failure)
    engine, troubles = _engine(step.spec), list[str]()
    found: _Found | None = None
    asked = 0
    for healer in _healers_for(step.spec, failure):
        asked += 1
        fix, trouble = await _ask(healer, failure, step)
        if fix is not None:
            used, trouble = await _use(step, failure, fix, engine.status_for(fix, healer))
            if used is not None and trouble is None:
                found = used
                break
            found = found or used
        if trouble is not None:
            troubles.append(trouble)
    if found is None and _is_foreign(step.spec):
        await _record(step, await _ask_foreign(step, failure, troubles))
        return
    fix, status, arguments = found or (None, HealingStatus.FAILED, None)
    result = HealingResult(failure, fix, status, feedback=fix.feedback if fix else None)
    result.attempts, result.error_message = asked, _joined(troubles)
    if fix is None:
        with contextlib.suppress(UserCallError):  # it may still be made, and the step goes on
            await called(engine.make_ticket, (result,), step.spec.timeout)
    engine.note(result)
    tried = _tried(failure, fix, result.status.name, result.error_message, arguments)
    await _record(step, tried)


async def _use(
    step: StepExecution, failure: Failure, fix: Fix, status: HealingStatus
) -> tuple[_Found | None, str | None]:
    """Return a fix if the next attempt gets something by it, and what is wrong with it.

    Of one that cannot be used the feedback is left, unless a later healer has more.
    """
    arguments = None
    if status is HealingStatus.FIXED:
        trouble = None
        try:  # before files are changed
            arguments = await _changed(step, fix.arguments) if fix.arguments else None
        except Exception as wrong:  # noqa: BLE001 - what the user's own healer gave
            trouble = cut(f"{fix.healer}: {plain_text(wrong)}", _MAX_TEXT)
        if trouble is None and fix.files:
            trouble = await _change_files(step, failure, fix)
            if trouble is not None:
                return None, trouble
        if trouble is not None:
            rest = replace(fix, arguments={}, files={}, wait=None)
            return _Found(rest, HealingStatus.AWAITING_REVIEW) if fix.feedback else None, trouble
    used = status is HealingStatus.FIXED or fix.feedback
    return (_Found(fix, status, arguments) if used else None), None


def _joined(troubles: list[str]) -> str | None:
    return cut("; ".join(troubles), _MAX_TEXT) or None


async def _ask(
    healer: Healer, failure: Failure, step: StepExecution
) -> tuple[Fix | None, str | None]:
    """Call a healer, for no longer than an attempt; if it raises, the next one is asked."""
    call, given = healer.propose, (failure, _engine(step.spec).workspace)
    in_loop = getattr(healer, "is_async", False) or is_async(call)
    name = name_of(healer)
    try:
        answer = await called(call, given, step.spec.timeout, in_loop=in_loop)
        fix = checked_fix(answer, name)
        if fix is not None:
            _check_wait(step, fix)
    except UserCallError as error:
        return None, cut(f"{name} {error}", _MAX_TEXT)
    except Exception as error:  # noqa: BLE001 - what the user's code gave, like the task
        return None, cut(f"{name}: {type(error).__name__}: {text_of(error)}", _MAX_TEXT)
    return fix, None


def _check_wait(step: StepExecution, fix: Fix) -> None:
    """Raise if the wait that a fix asks for is none, or longer than the step may take."""
    wait: object = fix.wait
    if wait is None:
        return
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < 1e9:
        raise ValueError(f"a fix waits for {wait!r} seconds, and must wait for 0 or more")
    limit = step.spec.options.max_elapsed_seconds
    limit = step.spec.config.level1.max_elapsed_seconds if limit is None else limit
    if limit is not None and step.record.elapsed() + wait > limit:
        raise ValueError(f"to wait for {wait:g} s exceeds the limit of {limit:g} s for the step")


def _tried(
    failure: Failure,
    fix: Fix | None,
    status: str,
    error: str | None,
    arguments: NewArguments | None = None,
) -> Tried:
    """Return what is recorded of a fix, with the arguments that the next attempts get by it."""
    facts: dict[str, Any] = {
        "status": status,
        "type": str(failure.failure_type),
        "fingerprint": failure.get_hash(),
        "error": error,
    }
    if fix is None:
        return Tried(_given(facts))
    facts |= {
        "fix": _text(fix.description),
        "feedback": _text(fix.feedback),
        "healer": _text(fix.healer) if status != "FAILED" else None,
        "seconds": fix.wait if status == "FIXED" else None,
        "files": sorted(fix.files) if status == "FIXED" and fix.files else None,
    }
    return Tried(_given(facts), *(arguments or ()))


async def _changed(step: StepExecution, arguments: Mapping[str, Any]) -> NewArguments:
    """Return all changed arguments of a step, with these among them, and how they are recorded."""
    before = await step.changed.by_name() if step.changed is not None else {}
    changed = {**before, **arguments}
    args, kwargs = with_changes(step.task, (step.args, step.kwargs), changed)
    for each in step.spec.checks:  # what is forbidden stays so, whoever asks for it
        await each.check(replace(step, args=args, kwargs=kwargs, changed=None))
    if step.record.run_id is None:
        return changed, None
    return changed, await encode_arguments(changed, stored=step.spec.options.records_arguments)


async def _record(step: StepExecution, tried: Tried) -> None:
    """Record what was tried, and let the next attempts have it."""
    repair = await step.record.record_repair(step.redacted(tried.facts), tried.encoded)
    if tried.changed is not None:
        data = tried.encoded.data if tried.encoded is not None else None
        # They were checked before they were recorded; in another life they are again.
        step.changed = step.checked = ChangedArguments(tried.changed, data)
    if repair is not None:
        step.repairs = [*step.repairs, repair]


def _given(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


# --- files of the workspace ------------------------------------------------------------------------


async def _change_files(step: StepExecution, failure: Failure, fix: Fix) -> str | None:
    """Change files, and check them; return why that failed, and then they are as they were."""
    workspace = _engine(step.spec).workspace
    facts = {
        "status": "IN_PROGRESS",
        "type": str(failure.failure_type),
        "fingerprint": failure.get_hash(),
        "healer": fix.healer,
        "fix": _text(fix.description),
        "files": sorted(fix.files),
        "workspace": str(workspace.root),
    }
    if not step.spec.options.records_arguments:
        return f"{fix.healer}: what files were is recorded, and the step has store_input=False or redact"
    try:
        before = await in_thread(lambda: workspace.before(fix.files))
    except Exception as error:  # noqa: BLE001 - what the user's own healer gave
        return cut(f"{fix.healer}: {plain_text(error)}", _MAX_TEXT)
    await step.record.record_files(_given(facts), before)
    turn = Turn()

    def undo() -> tuple[tuple[str, ...], tuple[str, ...]]:
        turn.end()
        return workspace.restore(before, whatever_they_are=True)

    try:
        call = workspace.write, (fix.files, before, fix.check, turn)
        await called(*call, step.spec.timeout)
    except Exception as error:  # noqa: BLE001 - the check is the user's own
        restored, left = await in_thread(undo)
        repair = Repair(step.record.started_attempt()[0], failure.get_hash(), fix.healer, facts)
        late = isinstance(error, UserCallError)
        reason = cut(f"the check {error}" if late else plain_text(error), _MAX_TEXT)
        verdict = Verdict(FAILED, reason, tuple(sorted(restored)), left)
        await step.record.record_verdict(repair, verdict)
        return f"{fix.healer}: {reason}"
    except BaseException as error:
        turn.end()
        # Of a run that is stopped, the next process restores them: by then this one's thread is
        # over, and until then another process may have the run.
        if step.record.run_id is None or not isinstance(error, asyncio.CancelledError):
            workspace.restore(before, whatever_they_are=True)
        raise
    return None


async def _restore_files(
    step: StepExecution, before: Mapping[str, FileBefore], root: str | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    workspace = _engine(step.spec).workspace if root is None else Workspace(root)
    return await in_thread(lambda: workspace.restore(before))


# --- verdicts --------------------------------------------------------------------------------------


async def judge(step: StepExecution, *, completed: bool) -> None:
    """Record what is known by now about the repairs that are not decided; restore files."""
    left: list[Repair] = []
    for repair in step.repairs:
        later = step.record.fingerprints_after(repair.attempt)
        verdict = verdict_of(repair, later, completed=completed)
        if verdict is None:
            left.append(repair)
            continue
        if verdict.verdict == UNDECIDED:
            if not repair.is_undecided:
                await step.record.record_verdict(repair, verdict)
            left.append(repair._replace(is_undecided=True))
            continue
        if verdict.verdict == FAILED and repair.facts.get("files"):
            before, root = step.record.files_before(repair)
            restored, changed = await _restore_files(step, before, root)
            verdict = verdict._replace(restored=restored, left=changed)
        await step.record.record_verdict(repair, verdict)
    step.repairs = left


async def judge_completed(step: StepExecution) -> None:
    """Judge the repairs of a step that is completed, whose process died before it could."""
    step.repairs = step.record.pending_repairs()
    await judge(step, completed=True)


async def continue_healing(step: StepExecution, *, goes_on: bool) -> None:
    """Continue what another process, or the round before, started: restore, judge, heal.

    ``goes_on``: there will be another attempt.
    """
    record = step.record
    for repair in record.interrupted_repairs():
        before, root = record.files_before(repair)
        restored, left = await _restore_files(step, before, root)
        reason = "its process died while it changed files"
        await record.record_verdict(repair, Verdict(INTERRUPTED, reason, restored, left))
    step.repairs = record.pending_repairs()
    await judge(step, completed=False)
    if not goes_on or not step.spec.heals:
        return
    found = record.unhealed_failure()
    if found is not None:
        error, diagnosis = found
        failure = recorded_failure(error, diagnosis, error_from(error))
        failure.failure_id = f"{record.effect_key}.{record.started_attempt()[0]}"
        failure.source = "execution"
        await heal(step, failure)


# --- engines of callers ----------------------------------------------------------------------------


async def _ask_foreign(step: StepExecution, failure: Failure, troubles: list[str]) -> Tried:
    """Call an engine of the caller's, for no longer than an attempt; if it raises, nothing is repaired."""
    engine, seconds = step.spec.healer, step.spec.timeout
    assert engine is not None
    try:
        call = engine.heal_single
        answer = await called(call, (failure,), seconds, in_loop=is_async(call))
        fix, status = _read(answer, type(engine).__name__)
    except UserCallError as error:
        return _tried(failure, None, "FAILED", _joined([*troubles, f"it {error}"]))
    except Exception as error:  # noqa: BLE001 - the user's code, like the task
        text = f"{type(error).__name__}: {text_of(error)}"
        return _tried(failure, None, "FAILED", _joined([*troubles, text]))
    arguments = None
    try:
        if status == "FIXED" and fix.arguments:
            arguments = await _changed(step, fix.arguments)
    except Exception as wrong:  # noqa: BLE001 - what the user's own engine gave
        troubles = [*troubles, plain_text(wrong)]
        status = "AWAITING_REVIEW" if fix.feedback else "FAILED"
    return _tried(failure, fix, status, _joined(troubles), arguments)


def _read(answer: object, name: str) -> tuple[Fix, str]:
    """Return what the engine of that name answered, whatever the classes of its objects are."""
    found = getattr(answer, "status", None)
    status = str(getattr(found, "value", found)).upper()[:_MAX_TEXT]
    fix = getattr(answer, "fix", None)
    arguments = _part(fix, "arguments")
    feedback = _text(getattr(answer, "feedback", None)) or _text(_part(fix, "feedback"))
    did_something = status == "FIXED" or feedback
    made = Fix(
        _text(_part(fix, "description")) or _text(fix) or "",
        feedback=feedback,
        arguments=dict(arguments) if isinstance(arguments, Mapping) else {},
        healer=_text(_part(fix, "healer")) or (name if did_something else ""),
    )
    return made, status


def _part(fix: object, name: str) -> object:
    return fix.get(name) if isinstance(fix, Mapping) else getattr(fix, name, None)


def _text(value: object) -> str | None:
    return cut(text_of(value), _MAX_TEXT) if isinstance(value, str) and value else None
