"""Asking for help: what a ticket says, that it is one, and that trouble with it hides nothing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.engine.errors import FailureReport, HelpNeeded
from maestro_hive.engine.escalation import (
    EscalationCase,
    JiraEscalation,
    actions_for,
    describe,
    labels_for,
    summarise,
)
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
)
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.testing import ManualClock, MemoryStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from maestro_hive.unified_execution.safety_retry import SafetyRetryWrapper
from tests.unified_execution.failing_tasks import Task, failing

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2030, 1, 1, tzinfo=UTC)
REPORT = FailureReport("lead writer", "TIMEOUT", "not done\nwithin 5 seconds")


class Jira:
    """Takes orders for tickets."""

    def __init__(self, answer: Any = "MD-7") -> None:
        self.answer = answer
        self.tickets: list[dict[str, Any]] = []

    async def create_ticket(
        self, project_key: str, summary: str, description: str, issue_type: str, labels: list[str]
    ) -> str:
        self.tickets.append(
            {
                "project_key": project_key,
                "summary": summary,
                "description": description,
                "issue_type": issue_type,
                "labels": labels,
            }
        )
        if isinstance(self.answer, BaseException):
            raise self.answer
        answer: str = self.answer
        return answer


@pytest.fixture
def make(config: ExecutionConfig) -> Callable[..., SafetyRetryWrapper]:
    config.level1 = Level1Config(base_delay_seconds=0)
    config.level2 = Level2Config(base_delay_seconds=0)
    config.jira_project_key = "OPS"
    store = MemoryStore(clock=ManualClock())

    def made(jira: Any = None, **options: Any) -> SafetyRetryWrapper:
        return SafetyRetryWrapper(config, jira, store=store, breaker="any", **options)

    return made


def raises_help_needed(wrapper: SafetyRetryWrapper, task: Task | None = None) -> HelpNeeded:
    execute = PersonaExecutor(wrapper.config, "writer").execute
    with pytest.raises(HelpNeeded) as raised:
        asyncio.run(wrapper.execute_safe(execute, task or failing(), task_name="draft"))
    return raised.value


def test_the_final_failure_makes_one_ticket_that_tells_it_all(
    make: Callable[..., SafetyRetryWrapper],
) -> None:
    jira = Jira()
    error = raises_help_needed(make(jira))
    assert error.jira_ticket == "MD-7"
    assert error.result is not None
    assert error.result.jira_ticket == "MD-7"
    assert "ticket MD-7" in str(error)
    (ticket,) = jira.tickets
    assert (ticket["project_key"], ticket["issue_type"]) == ("OPS", "Bug")
    assert ticket["summary"] == "draft: UNKNOWN: no 6"
    assert ticket["labels"] == ["maestro-hive", "unknown", "writer"]
    text = ticket["description"]
    for words in ("Task: draft", "Persona: writer", "Attempts: 6 in 2 round(s)"):
        assert words in text
    for number in range(1, 7):
        assert f"RuntimeError: no {number}" in text
    assert "- then execute it again" in text


def test_a_success_makes_no_ticket(make: Callable[..., SafetyRetryWrapper]) -> None:
    jira = Jira()
    asyncio.run(make(jira).execute_safe(failing(1)))
    assert jira.tickets == []


@pytest.mark.parametrize(
    "answer, reason",
    [
        (ConnectionError("no route to jira"), "ConnectionError: no route to jira"),
        (None, "TypeError: create_ticket returned None"),
        ("", "TypeError: create_ticket returned ''"),
    ],
)
def test_trouble_with_jira_does_not_hide_the_failure(
    make: Callable[..., SafetyRetryWrapper], answer: Any, reason: str
) -> None:
    jira = Jira(answer)
    error = raises_help_needed(make(jira))
    assert len(jira.tickets) == 1
    assert error.jira_ticket is None
    assert error.failure_report.details == "no 6"
    assert error.context["escalation_error"].startswith(reason)
    assert error.suggested_actions[-1].startswith(
        f"file a ticket by hand: the escalation failed ({reason}"
    )


def test_a_client_that_is_not_async_will_do(make: Callable[..., SafetyRetryWrapper]) -> None:
    class Blocking:
        def create_ticket(self, **_: Any) -> str:
            return "MD-8"

    assert raises_help_needed(make(Blocking())).jira_ticket == "MD-8"


def test_when_it_is_switched_off_no_ticket_is_made(
    config: ExecutionConfig, make: Callable[..., SafetyRetryWrapper]
) -> None:
    config.level2.enable_jira_escalation = False
    jira = Jira()
    error = raises_help_needed(make(jira))
    assert error.jira_ticket is None
    assert jira.tickets == []
    assert "escalation_error" not in error.context


def test_an_escalation_of_ones_own_comes_before_jira(
    make: Callable[..., SafetyRetryWrapper],
) -> None:
    class Pager:
        def __init__(self) -> None:
            self.cases: list[EscalationCase] = []

        async def escalate(self, case: EscalationCase) -> str | None:
            self.cases.append(case)
            return None

    pager, jira = Pager(), Jira()
    error = raises_help_needed(make(jira, escalation=pager))
    assert error.jira_ticket is None
    assert jira.tickets == []
    (case,) = pager.cases
    assert (case.run_id, case.task_name) == (None, "draft")
    assert case.failure_report == error.failure_report
    assert len(case.effect_key) == 32


@pytest.mark.parametrize(
    "jira", [object(), "https://jira.example.com", type("J", (), {"create_ticket": 1})()]
)
def test_a_client_that_cannot_make_tickets_is_refused_when_it_is_given(
    make: Callable[..., SafetyRetryWrapper], jira: Any
) -> None:
    with pytest.raises(ConfigurationError, match=r"jira_client .* create_ticket"):
        make(jira)
    with pytest.raises(ConfigurationError, match="create_ticket"):
        JiraEscalation(jira, "MD")


def test_an_escalation_that_cannot_escalate_is_refused_when_it_is_given(
    make: Callable[..., SafetyRetryWrapper],
) -> None:
    with pytest.raises(ConfigurationError, match=r"escalation .* escalate"):
        make(escalation=object())


def test_a_summary_is_one_line_that_jira_takes() -> None:
    assert summarise("draft", REPORT) == "draft: TIMEOUT: not done within 5 seconds"
    assert len(summarise("draft", FailureReport("p", "X", "y" * 900))) == 255


def test_labels_have_no_spaces() -> None:
    assert labels_for(REPORT) == ("maestro-hive", "timeout", "lead-writer")


def test_what_to_do_depends_on_what_failed() -> None:
    fix = FailureReport("p", "TIMEOUT", "late", suggested_fix="split it")
    assert actions_for(fix, "run-1") == [
        "split it",
        "increase timeout_seconds, or give the step less work",
        "then retry it: `maestro retry run-1`, or options(retry=True) of an executor; until then, run run-1 raises the same failure again",
    ]
    assert actions_for(FailureReport("p", "of tomorrow", "?"), None) == [
        "check the error of the last attempt",
        "then execute it again",
    ]


def test_a_description_reads_well() -> None:
    attempt = ExecutionAttempt(
        "1.1",
        1,
        NOW,
        NOW + timedelta(seconds=5),
        ExecutionStatus.FAILED,
        error_type="TimeoutError",
        error_message="late",
    )
    killed = ExecutionAttempt("1.2", 2, NOW, status=ExecutionStatus.INTERRUPTED)
    rounds = [ExecutionResult("e", "draft", "lead writer", attempts=[attempt, killed])]
    text = describe(
        task_name="draft", run_id="run-1", report=REPORT, rounds=rounds, actions=["sleep on it"]
    )
    assert text == (
        "All retry levels are exhausted for draft.\n"
        "\n"
        "Task: draft\n"
        "Persona: lead writer\n"
        "Run: run-1\n"
        "Error: TIMEOUT: not done\nwithin 5 seconds\n"
        "Attempts: 2 in 1 round(s)\n"
        "\n"
        "Attempts of each round:\n"
        "Round 1\n"
        "  Attempt 1, 2030-01-01 00:00:00 UTC, 5.0 s: failed, TimeoutError: late\n"
        "  Attempt 2, 2030-01-01 00:00:00 UTC, 0.0 s: interrupted\n"
        "\n"
        "What to do next:\n"
        "- sleep on it"
    )
