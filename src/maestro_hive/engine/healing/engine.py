"""``SelfHealingEngine``: asks the healers of a failure's type, applies what is sure, and tells the rest."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import settings
from maestro_hive.engine.errors import text_of
from maestro_hive.engine.healing.detector import FailureDetector, check_format, describe
from maestro_hive.engine.healing.failure import (
    Failure,
    FailureType,
    Fix,
    HealingResult,
    HealingStatus,
    failure_of_error,
)
from maestro_hive.engine.healing.function_healers import checked_fix
from maestro_hive.engine.healing.healers import DEFAULT_HEALERS, name_of, suits
from maestro_hive.engine.healing.workspace import Workspace
from maestro_hive.engine.settings import refused

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from maestro_hive.engine.healing.healers import Healer

#: How many failures an engine reports on.
_MOST_RESULTS = 10_000

_threshold = settings.rule(float, "a share from 0 to 1", lambda value: 0 <= value <= 1)


class SelfHealingEngine:
    """Holds healers by the type of failure that they handle, and asks them for a fix.

    A fix at least as sure as ``auto_approve_threshold`` is used: changed arguments by the next attempt;
    changed files of the workspace only with ``auto_apply``, and they are restored if their check fails.
    Any other fix, and feedback alone, awaits review; the next attempt is given the feedback all the same.
    At most ``max_retries`` healers are asked about one failure: first the one whose fix worked before
    for the same fingerprint, in any run of the state folder; last those whose fix did not help this
    step. With ``jira_fallback``, ``create_ticket`` is called, once for a fingerprint,
    for what no healer can fix.
    """

    def __init__(
        self,
        workspace_root: str | os.PathLike[str] | None = None,
        auto_apply: bool = False,
        auto_approve_threshold: float = 0.95,
        max_retries: int = 3,
        jira_fallback: bool = True,
        *,
        healers: Iterable[Healer] | None = None,
        create_ticket: Callable[[Failure], str] | None = None,
    ) -> None:
        self.workspace = Workspace(workspace_root)
        self.workspace_root = self.workspace.root
        self.auto_apply = settings.flag("auto_apply", auto_apply)
        self.auto_approve_threshold = _threshold("auto_approve_threshold", auto_approve_threshold)
        self.max_retries = settings.whole(1)("max_retries", max_retries)
        self.jira_fallback = settings.flag("jira_fallback", jira_fallback)
        if create_ticket is not None and not callable(create_ticket):
            raise refused("create_ticket", create_ticket, "a function of a Failure, or None")
        self._create_ticket = create_ticket
        self._healers = [
            _checked(each) for each in (DEFAULT_HEALERS if healers is None else healers)
        ]
        #: What became of each failure, in order; of very many, the latest.
        self.results: list[HealingResult] = []
        self._worked: dict[str, Healer] = {}
        self._tickets: dict[str, str] = {}
        self._lock = threading.Lock()  # attempts may fail at the same time, in threads
        self._ticket_lock = threading.Lock()  # one of its own: a ticket may take long

    def add_healer(self, healer: Healer) -> None:
        """Ask this one too, after the others of its types."""
        self._healers.append(_checked(healer))

    # --- healing ---

    def heal_single(self, failure: Failure | BaseException) -> HealingResult:
        """Return what became of one failure; an exception is taken as one."""
        if isinstance(failure, BaseException):
            failure = failure_of_error(failure, root=self.workspace_root)
        started = time.perf_counter()
        result = self._healed(failure)
        if result.status is HealingStatus.FAILED:
            self.make_ticket(result)
        result.duration_ms = (time.perf_counter() - started) * 1000
        self.note(result)
        return result

    def note(self, result: HealingResult) -> None:
        """Take what became of a failure into the report."""
        with self._lock:
            self.results.append(result)
            del self.results[:-_MOST_RESULTS]

    def heal(
        self,
        pytest_output: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        execution_history: str | os.PathLike[str] | None = None,
    ) -> list[HealingResult]:
        """Find the failures in these files, and return what became of each, once for a fingerprint.

        ``pytest_output`` is what pytest printed, or its JSON report if the file is called so.
        """
        detector = FailureDetector(self.workspace_root)
        if pytest_output is not None:
            is_json = str(pytest_output).endswith(".json")
            scan = detector.scan_pytest_json if is_json else detector.scan_pytest
            scan(pytest_output)
        if log_path is not None:
            detector.scan_logs(log_path)
        if execution_history is not None:
            detector.scan_execution_history(execution_history)
        return [self.heal_single(each) for each in detector.failures]

    def _healed(self, failure: Failure) -> HealingResult:
        proposed = HealingResult(failure, None, HealingStatus.FAILED, attempts=0)
        troubles: list[str] = []
        for attempts, healer in enumerate(self._healers_for(failure), 1):
            proposed.attempts = attempts
            try:
                answer = _awaited(healer.propose(failure, self.workspace))
                fix = checked_fix(answer, name_of(healer))
                if fix is None:
                    continue
                status = self.status_for(fix, healer)
                if status is HealingStatus.FIXED and fix.files:
                    self.workspace.change(fix.files, fix.check)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the user's own
                troubles.append(f"{name_of(healer)}: {type(error).__name__}: {text_of(error)}")
                continue
            if status is HealingStatus.FIXED:
                with self._lock:
                    self._worked[failure.get_hash()] = healer
                return HealingResult(failure, fix, status, None, fix.feedback, attempts=attempts)
            if proposed.fix is None:
                proposed.fix, proposed.status, proposed.feedback = fix, status, fix.feedback
        if proposed.status is HealingStatus.FAILED:
            reason = f"no healer has a fix for {str(failure.failure_type).upper()}"
            proposed.error_message = "; ".join(troubles) or reason
        return proposed

    @property
    def healers(self) -> tuple[Healer, ...]:
        """The healers that it holds, in the order in which they were added."""
        return tuple(self._healers)

    def _healers_for(self, failure: Failure) -> list[Healer]:
        here = self._worked.get(failure.get_hash())
        return ranked(failure, self._healers, here)[: self.max_retries]

    def status_for(self, fix: Fix, healer: Healer) -> HealingStatus:
        """Return whether a fix is to be used, or awaits review."""
        if not fix.arguments and not fix.files:
            waits = fix.wait is not None
            return HealingStatus.FIXED if waits else HealingStatus.AWAITING_REVIEW
        may_apply = self.auto_apply or getattr(healer, "applies_files", False)
        if fix.confidence < self.auto_approve_threshold or (fix.files and not may_apply):
            return HealingStatus.AWAITING_REVIEW
        return HealingStatus.FIXED

    def make_ticket(self, result: HealingResult) -> None:
        """Let a ticket be made for what no healer can fix, once for a fingerprint."""
        create = self._create_ticket
        if not self.jira_fallback or create is None:
            return
        fingerprint = result.failure.get_hash()
        with self._ticket_lock:  # held while it is made: two would be made otherwise
            try:
                if fingerprint not in self._tickets:
                    self._tickets[fingerprint] = create(result.failure)
            except Exception as error:  # noqa: BLE001 - the user's own client
                trouble = f"no ticket was made: {type(error).__name__}: {text_of(error)}"
                result.error_message = f"{result.error_message}; {trouble}"
                return
            result.jira_ticket = self._tickets[fingerprint]
        result.status = HealingStatus.JIRA_CREATED

    # --- what became of them ---

    def get_stats(self) -> dict[str, Any]:
        """Return how many failures there were, and what became of them."""
        results = list(self.results)
        statuses = Counter(str(each.status) for each in results)
        total = len(results)
        fixed = statuses[HealingStatus.FIXED.value]
        return {
            "total": total,
            **{status.value: statuses[status.value] for status in HealingStatus},
            "by_type": dict(Counter(str(each.failure.failure_type) for each in results)),
            "success_rate": fixed / total if total else 0.0,
            "attempts": sum(each.attempts for each in results),
            "average_duration_ms": sum(e.duration_ms for e in results) / total if total else 0.0,
        }

    def generate_report(self, format: str = "text") -> str:  # noqa: A002 - as callers know it
        """Return a report of what became of all failures, as ``text`` or ``json``."""
        check_format(format)
        stats, results = self.get_stats(), list(self.results)
        if format == "json":
            report = {"stats": stats, "results": [each.to_dict() for each in results]}
            return json.dumps(report, indent=2)
        lines = [f"{stats['total']} failures, {stats['fixed']} fixed"]
        for each in results:
            lines += ["", f"{each.status.name}: {describe(each.failure)}"]
            fix = each.fix.description if isinstance(each.fix, Fix) else None
            facts = {
                "fix": fix,
                "ticket": each.jira_ticket,
                "error": each.error_message,
            }
            lines += [f"  {name}: {value}" for name, value in facts.items() if value]
        return "\n".join(lines)


def ranked(failure: Failure, healers: Iterable[Healer], here: Healer | None = None) -> list[Healer]:
    """Return the healers to ask about a failure: what worked before first, what failed now last."""
    tried: object = failure.context.get("tried", ())
    before: object = failure.context.get("worked_before")

    def rank(healer: Healer) -> tuple[bool, bool, bool]:
        name = name_of(healer)
        failed = isinstance(tried, list | tuple) and name in tried
        return failed, name != before, healer is not here

    return sorted((each for each in healers if suits(each, failure)), key=rank)


def _awaited(answer: object) -> object:
    """Return what a healer answered; one that is async is run to its end."""
    if not inspect.isawaitable(answer):
        return answer

    async def wait() -> object:
        return await answer

    return asyncio.run(wait())


def _checked(healer: Healer) -> Healer:
    given: object = healer
    handles: object = getattr(given, "handles", None)
    listed = tuple(handles) if isinstance(handles, frozenset | set | tuple | list) else (None,)
    known = all(isinstance(each, FailureType) for each in listed)
    if not known or not callable(getattr(given, "propose", None)):
        wanted = "an object with `handles`, a set of FailureType, and `propose(failure, workspace)`"
        raise refused("a healer", given, wanted)
    return healer
