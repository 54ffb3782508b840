"""What the output of agents says: sessions, usage counted once, results and failures.

The samples are short forms of what the programs printed to a model server on loopback.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.prices import Prices
from maestro_hive.engine.usage import Usage, usage_in
from maestro_hive.team.agents import (
    Acted,
    AgentFailedError,
    AgentRefusedError,
    Call,
    Denied,
    Failure,
    FailureKind,
    Outcome,
    Said,
    Session,
    SessionKnown,
    Totals,
    Used,
    Waiting,
    adapter,
)
from maestro_hive.team.agents.failures import failure_of, wait_in
from maestro_hive.team.graph import AGENTS
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maestro_hive.team.agents import Event

ID = "11111111-2222-4333-8444-555555555555"
SCHEMA = {"type": "object"}


def read(
    agent: str,
    lines: Iterable[Any],
    *,
    code: int = 0,
    errors: str = "",
    prices: Prices | None = None,
    **more: Any,
) -> tuple[list[Event], Outcome]:
    session = more.pop("session", adapter(agent).new_session("seed") and Session(id=ID))
    call = Call(prompt="p", folder="/call", session=session, **more)
    reader = adapter(agent).reader(call, prices)
    events: list[Event] = []
    for line in lines:
        events += reader.read(line if isinstance(line, str) else json.dumps(line))
    return events, reader.end(code, errors)


def used(events: Iterable[Event]) -> Totals:
    total = Totals()
    for each in events:
        total = total.plus(each.amount) if isinstance(each, Used) else total
    return total


def kind(outcome: Outcome) -> FailureKind | None:
    return outcome.failure.kind if outcome.failure else None


# --- claude ---------------------------------------------------------------------------------------


def claude_init(version: str) -> dict[str, Any]:
    return {
        "type": "system",
        "subtype": "init",
        "session_id": ID,
        "model": "claude-sonnet-4-5",
        "claude_code_version": version,
    }


def claude_message(name: str, given: int, made: int) -> list[dict[str, Any]]:
    usage = {"input_tokens": given, "output_tokens": 1, "cache_read_input_tokens": 5}
    message = {"id": name, "model": "claude-sonnet-4-5", "usage": usage}
    text = {"type": "text", "text": name}
    delta = {"type": "message_delta", "usage": {"output_tokens": made}}
    return [
        {"type": "stream_event", "event": {"type": "message_start", "message": message}},
        {"type": "assistant", "message": {**message, "content": [text]}},
        {"type": "stream_event", "event": delta},
    ]


def by_model(given: int, made: int, cached: int, usd: float) -> dict[str, Any]:
    counts = {"inputTokens": given, "outputTokens": made, "cacheReadInputTokens": cached}
    return {"claude-sonnet-4-5": {**counts, "costUSD": usd}}


def claude_result(**more: Any) -> dict[str, Any]:
    return {
        "type": "result",
        "subtype": "success",
        "is_error": False,
        "result": "done",
        "session_id": ID,
        **more,
    }


def test_claude_says_its_session_and_its_answer() -> None:
    events, outcome = read("claude", [claude_init("2.1.197"), claude_result()])
    assert events == [SessionKnown(session=Session(id=ID, started=True))]
    assert outcome == Outcome(text="done", session=Session(id=ID, started=True))


def test_claude_counts_each_message_when_it_ends_and_the_rest_with_the_result() -> None:
    # 7 of input and 2 of output are a request that claude made on its own.
    lines = [
        claude_init("2.1.197"),
        *claude_message("a", 10, 4),
        *claude_message("b", 20, 6),
        claude_result(modelUsage=by_model(37, 12, 10, 0.001)),
    ]
    events, outcome = read("claude", lines)
    amounts = [each.amount for each in events if isinstance(each, Used)]
    assert amounts == [Totals(10, 4, 5), Totals(20, 6, 5), Totals(7, 2, 0, 0, 1000)]
    assert outcome.session == Session(id=ID, started=True, counted=Totals(37, 12, 10, 0, 1000))


def test_claude_that_was_killed_has_counted_what_it_got() -> None:
    events, outcome = read("claude", [claude_init("2.1.197"), *claude_message("a", 10, 4)], code=-9)
    assert used(events) == Totals(10, 4, 5)
    assert kind(outcome) is FailureKind.CUT
    assert outcome.session == Session(id=ID, started=True, counted=Totals(10, 4, 5))


def test_claude_that_reports_whole_sessions_is_counted_by_difference() -> None:
    first, outcome = read(
        "claude",
        [claude_init("2.1.325"), claude_result(modelUsage=by_model(30, 10, 10, 0.002))],
    )
    lines = [
        claude_init("2.1.325"),
        *claude_message("c", 5, 3),
        claude_result(modelUsage=by_model(36, 13, 15, 0.0025)),
    ]
    second, after = read("claude", lines, session=outcome.session)
    assert used(first) == Totals(30, 10, 10, 0, 2000)
    assert used(second) == Totals(6, 3, 5, 0, 500)
    assert after.session is not None
    assert after.session.counted == Totals(36, 13, 15, 0, 2500)


def test_a_session_of_claude_that_forgot_a_killed_call_is_counted_by_the_call() -> None:
    before = Session(id=ID, started=True, counted=Totals(100, 50, 0, 0, 9000))
    lines = [
        claude_init("2.1.326"),
        claude_result(
            modelUsage=by_model(20, 6, 0, 0.001),
            model_usage_since_last_result=by_model(20, 6, 0, 0.001),
        ),
    ]
    events, _ = read("claude", lines, session=before)
    assert used(events) == Totals(20, 6, 0, 0, 1000)


def test_claude_over_its_budget_is_counted_although_its_usage_is_zero() -> None:
    result = claude_result(
        subtype="error_max_budget_usd",
        is_error=True,
        errors=["Reached maximum budget ($0.5)"],
        usage={"input_tokens": 0, "output_tokens": 0},
        modelUsage=by_model(30, 10, 0, 0.6),
    )
    events, outcome = read("claude", [claude_init("2.1.326"), result], code=1)
    assert used(events) == Totals(30, 10, 0, 0, 600_000)
    assert outcome.failure == Failure(
        kind=FailureKind.BUDGET, message="Reached maximum budget ($0.5)"
    )


def test_money_of_a_killed_call_is_what_the_price_list_says_and_is_not_counted_twice() -> None:
    prices = Prices({"claude-sonnet-4-5": {"input": 3, "output": 15, "cached": 0.3}})
    lines = [claude_init("2.1.197"), *claude_message("a", 10_000, 4_000)]
    events, _ = read("claude", lines, code=-9, prices=prices)
    assert used(events).usd == 30_000 + 60_000 + 2
    done = claude_result(modelUsage=by_model(10_000, 4_000, 5, 0.0900025))
    events, _ = read("claude", [*lines, done], prices=prices)
    assert used(events).usd == 90_002


def test_claude_that_waits_and_gives_up_is_rate_limited_for_the_time_it_waited() -> None:
    waits = {
        "type": "system",
        "subtype": "api_retry",
        "attempt": 1,
        "retry_delay_ms": 1500,
        "error_status": 429,
        "error": "rate_limit",
    }
    said = "API Error: Request rejected (429) · slow down"
    result = claude_result(is_error=True, api_error_status=429, result=said)
    events, outcome = read("claude", [claude_init("2.1.197"), waits, result], code=1)
    (waiting,) = [each for each in events if isinstance(each, Waiting)]
    assert (waiting.kind, waiting.seconds) == (FailureKind.RATE_LIMITED, 1.5)
    assert outcome.failure == Failure(kind=FailureKind.RATE_LIMITED, message=said, retry_after=1.5)
    _, killed = read("claude", [claude_init("2.1.197"), waits], code=-15)
    assert kind(killed) is FailureKind.RATE_LIMITED


@for_each(
    "status, said, expected",
    [
        (413, "Prompt is too long", FailureKind.CONTEXT_FULL),
        (401, "Failed to authenticate. API Error: 401 bad", FailureKind.NOT_AUTHENTICATED),
        (None, "Not logged in · Please run /login", FailureKind.NOT_AUTHENTICATED),
        (500, "API Error: 500 oops", FailureKind.UNAVAILABLE),
        (529, "API Error: 529 Overloaded", FailureKind.UNAVAILABLE),
        (400, "API Error: 400 no such tool", FailureKind.FAILED),
    ],
)
def test_claude_says_why_it_failed(status: int | None, said: str, expected: FailureKind) -> None:
    result = claude_result(is_error=True, api_error_status=status, result=said)
    _, outcome = read("claude", [claude_init("2.1.197"), result], code=1)
    assert kind(outcome) is expected


def test_claude_names_the_tools_that_nobody_has_permitted_once() -> None:
    denial = {"type": "system", "subtype": "permission_denied", "tool_name": "Write"}
    denials = [{"tool_name": "Write", "tool_input": {"file_path": "a.txt"}}, {"tool_name": "Bash"}]
    lines = [claude_init("2.1.326"), denial, claude_result(permission_denials=denials)]
    events, outcome = read("claude", lines)
    assert [each.tool for each in events if isinstance(each, Denied)] == ["Write", "Bash"]
    assert outcome.denied == ("Write", "Bash")


def test_claude_gives_a_structured_result() -> None:
    lines = [claude_init("2.1.326"), claude_result(structured_output={"n": 3})]
    assert read("claude", lines, schema=SCHEMA)[1].structured == {"n": 3}
    _, without = read("claude", [claude_init("2.1.326"), claude_result()], schema=SCHEMA)
    assert kind(without) is FailureKind.NO_STRUCTURE


# --- sessions that are wrong ----------------------------------------------------------------------


@for_each(
    "agent, errors",
    [
        ("claude", f"No conversation found with session ID: {ID}"),
        ("gemini", f'Error resuming session: Invalid session identifier "{ID}".'),
        ("qwen", f"No saved session found with ID {ID}. Run `qwen --resume` without an ID"),
        ("codex", f"Error: thread/resume failed: no rollout found for thread id {ID}"),
        ("opencode", "\x1b[91mError: \x1b[0mSession not found"),
    ],
)
def test_a_session_that_was_never_saved_is_started_with_no_attempt_spent(
    agent: str, errors: str
) -> None:
    before = Session(id=ID, started=True)
    _, outcome = read(agent, [], code=1, errors=errors, session=before)
    assert kind(outcome) is FailureKind.NO_SESSION
    assert outcome.try_again_now
    assert outcome.session == Session(id=ID, started=False)
    argv = adapter(agent).command(Call(prompt="p", folder="/call", session=outcome.session)).argv
    assert not any(each.startswith(("--resume", "--session=")) for each in argv)
    assert "resume" not in argv


@pytest.mark.parametrize(
    "agent, errors",
    [
        ("claude", f"Error: Session ID {ID} is already in use."),
        ("gemini", f'Error starting session: Session ID "{ID}" already exists. Use --resume'),
        ("qwen", f"Error: Session Id {ID} is already in use."),
    ],
)
def test_a_session_that_exists_is_resumed_with_no_attempt_spent(agent: str, errors: str) -> None:
    _, outcome = read(agent, [], code=42, errors=errors)
    assert kind(outcome) is FailureKind.SESSION_EXISTS
    assert outcome.try_again_now
    assert outcome.session == Session(id=ID, started=True)


@for_each("bad", ["--yolo", "a b", "../../x", "", 7, None, ["x"], "x" * 200])
def test_an_output_cannot_hide_a_flag_in_the_id_of_a_session(bad: Any) -> None:
    events, outcome = read("codex", [{"type": "thread.started", "thread_id": bad}])
    assert events == []
    assert outcome.session is None


def test_a_context_that_is_full_needs_another_session() -> None:
    result = claude_result(is_error=True, api_error_status=413, result="Prompt is too long")
    _, outcome = read("claude", [claude_init("2.1.197"), result], code=1)
    assert outcome.session is None
    assert not outcome.try_again_now


# --- codex ----------------------------------------------------------------------------------------


def codex(given: int, cached: int, made: int, text: str = "hi") -> list[dict[str, Any]]:
    counts = {"input_tokens": given, "cached_input_tokens": cached, "output_tokens": made}
    item = {"id": "item_1", "type": "agent_message", "text": text}
    return [
        {"type": "thread.started", "thread_id": ID},
        {"type": "item.started", "item": {"type": "command_execution", "command": "ls -l"}},
        {"type": "item.completed", "item": item},
        {"type": "turn.completed", "usage": {**counts, "cache_write_input_tokens": 2}},
    ]


def test_codex_names_its_session_first_and_is_counted_by_difference() -> None:
    first, outcome = read("codex", codex(100, 60, 20))
    assert first[:3] == [
        SessionKnown(session=Session(id=ID, started=True)),
        Acted(tool="command_execution", detail="ls -l"),
        Said(text="hi"),
    ]
    assert used(first) == Totals(38, 20, 60, 2)
    second, after = read("codex", codex(150, 70, 25), session=outcome.session)
    assert used(second) == Totals(40, 5, 10, 0)
    assert after.session is not None
    assert after.session.counted == Totals(78, 25, 70, 2)


def test_codex_that_started_another_session_is_counted_from_nothing() -> None:
    before = Session(id="other", started=True, counted=Totals(1000, 1000, 1000, 1000))
    events, outcome = read("codex", codex(100, 60, 20), session=before)
    assert used(events) == Totals(38, 20, 60, 2)
    assert outcome.session is not None
    assert outcome.session.id == ID


@for_each(
    "said, expected",
    [
        ("exceeded retry limit, last status: 429 Too Many Requests", FailureKind.RATE_LIMITED),
        ("unexpected status 401 Unauthorized: no", FailureKind.NOT_AUTHENTICATED),
        ("Missing environment variable: `OPENAI_API_KEY`.", FailureKind.NOT_AUTHENTICATED),
        ("unexpected status 413 Payload: prompt is too long", FailureKind.CONTEXT_FULL),
        ("stream disconnected before completion", FailureKind.UNAVAILABLE),
        ("the model refused", FailureKind.FAILED),
    ],
)
def test_codex_says_why_it_failed(said: str, expected: FailureKind) -> None:
    lines = [
        {"type": "thread.started", "thread_id": ID},
        {"type": "error", "message": f"Reconnecting... 1/5 ({said})"},
        {"type": "turn.failed", "error": {"message": said}},
    ]
    events, outcome = read("codex", lines, code=1)
    assert [each.kind for each in events if isinstance(each, Waiting)] == [expected]
    assert outcome.failure == Failure(kind=expected, message=said)


def test_codex_gives_a_structured_result() -> None:
    lines = codex(1, 0, 1, '{"n": 3}')
    assert read("codex", lines, schema=SCHEMA)[1].structured == {"n": 3}
    assert kind(read("codex", codex(1, 0, 1), schema=SCHEMA)[1]) is FailureKind.NO_STRUCTURE
    assert read("codex", lines)[1].structured is None


# --- gemini ---------------------------------------------------------------------------------------


def gemini(*between: dict[str, Any], **result: Any) -> list[dict[str, Any]]:
    counts = {"total_tokens": 130, "input_tokens": 100, "output_tokens": 20, "cached": 60}
    stats = {"models": {"gemini-2.5-pro": counts}}
    return [
        {"type": "init", "session_id": ID, "model": "gemini-2.5-pro"},
        {"type": "message", "role": "user", "content": "p"},
        *between,
        {"type": "message", "role": "assistant", "content": "do", "delta": True},
        {"type": "message", "role": "assistant", "content": "ne", "delta": True},
        {"type": "result", "status": "success", "stats": stats, **result},
    ]


def test_gemini_counts_its_thoughts_as_output() -> None:
    events, outcome = read("gemini", gemini())
    assert used(events) == Totals(40, 30, 60)
    assert outcome.text == "done"


def test_each_call_of_gemini_is_counted_by_itself() -> None:
    _, outcome = read("gemini", gemini())
    events, _ = read("gemini", gemini(), session=outcome.session)
    assert used(events) == Totals(40, 30, 60)


def test_gemini_says_last_what_it_says_after_its_tools() -> None:
    parameters = {"file_path": "a.txt", "content": "x"}
    tool = {"type": "tool_use", "tool_name": "write_file", "tool_id": "1", "parameters": parameters}
    error = {"type": "tool_not_registered", "message": "not found"}
    denied = {"type": "tool_result", "tool_id": "1", "status": "error", "error": error}
    first = {"type": "message", "role": "assistant", "content": "I will write it.", "delta": True}
    events, outcome = read("gemini", gemini(first, tool, denied))
    assert outcome.text == "done"
    assert Acted(tool="write_file", detail="a.txt") in events
    assert outcome.denied == ("write_file",)


@pytest.mark.parametrize(
    "code, errors, expected",
    [
        (41, "Invalid auth method selected.", FailureKind.NOT_AUTHENTICATED),
        (55, "Gemini CLI is not running in a trusted directory.", FailureKind.NOT_PERMITTED),
        (1, "something else", FailureKind.FAILED),
    ],
)
def test_gemini_that_does_not_start_says_why(code: int, errors: str, expected: FailureKind) -> None:
    _, outcome = read("gemini", [], code=code, errors=errors)
    assert outcome.failure is not None
    assert outcome.failure.kind is expected
    assert outcome.failure.message == f"it ended with exit code {code}: {errors}"


def test_gemini_quotes_the_response_that_it_failed_with() -> None:
    response = '{"error": {"code": 429, "message": "please retry in 7.5s"}}'
    error = {"type": "unknown", "message": f"[API Error: {response}]"}
    _, outcome = read("gemini", gemini(status="error", error=error), code=1)
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.RATE_LIMITED
    assert outcome.failure.retry_after == 7.5


def test_gemini_that_waits_when_it_is_ended_was_rate_limited() -> None:
    waits = "Attempt 1 failed with status 429. Retrying with backoff... _ApiError"
    events, outcome = read("gemini", [*gemini()[:2], waits], code=-15)
    assert [each.kind for each in events if isinstance(each, Waiting)] == ["rate limited"]
    assert kind(outcome) is FailureKind.RATE_LIMITED


# --- qwen -----------------------------------------------------------------------------------------


def qwen_usage(given: int, made: int, cached: int) -> dict[str, int]:
    counts = {"input_tokens": given, "output_tokens": made, "cache_read_input_tokens": cached}
    return {**counts, "total_tokens": given + made}


def qwen(name: str, text: str, message: dict[str, int], whole: dict[str, int]) -> list[Any]:
    content = [{"type": "text", "text": text}]
    return [
        {"type": "system", "subtype": "init", "session_id": ID, "model": "qwen3"},
        {"type": "assistant", "message": {"id": name, "content": content, "usage": message}},
        {
            "type": "result",
            "subtype": "success",
            "is_error": False,
            "result": text,
            "usage": whole,
        },
    ]


def test_qwen_counts_messages_and_then_the_rest_of_its_session() -> None:
    first, outcome = read(
        "qwen", qwen("a", "one", qwen_usage(100, 20, 60), qwen_usage(111, 23, 60))
    )
    assert used(first) == Totals(51, 23, 60)
    lines = qwen("b", "two", qwen_usage(50, 5, 0), qwen_usage(161, 28, 60))
    second, after = read("qwen", lines, session=outcome.session)
    assert used(second) == Totals(50, 5, 0)
    assert after.text == "two"


@pytest.mark.parametrize(
    "said, expected",
    [
        ("[API Error: 401 no]", FailureKind.NOT_AUTHENTICATED),
        ("[API Error: 413 prompt is too long]", FailureKind.CONTEXT_FULL),
        ("[API Error: 429 slow down]", FailureKind.RATE_LIMITED),
    ],
)
def test_qwen_that_answers_with_an_error_and_exit_code_0_has_failed(
    said: str, expected: FailureKind
) -> None:
    nothing = {"input_tokens": 0, "output_tokens": 0}
    events, outcome = read("qwen", qwen("a", said, nothing, nothing))
    assert kind(outcome) is expected
    assert not [each for each in events if isinstance(each, Said)]


def test_a_model_of_qwen_may_talk_about_errors() -> None:
    lines = qwen("a", "[API Error: 401 no]", qwen_usage(10, 5, 0), qwen_usage(10, 5, 0))
    assert read("qwen", lines)[1].failure is None


def test_qwen_gives_a_structured_result_and_names_what_nobody_permitted() -> None:
    lines = qwen("a", "x", qwen_usage(1, 1, 0), qwen_usage(1, 1, 0))
    lines[-1]["structured_result"] = {"n": 3}
    lines[-1]["permission_denials"] = [{"tool_name": "write_file", "tool_input": {"path": "a"}}]
    _, outcome = read("qwen", lines, schema=SCHEMA)
    assert (outcome.structured, outcome.denied) == ({"n": 3}, ("write_file",))


# --- opencode -------------------------------------------------------------------------------------


def opencode(kind: str, **part: Any) -> dict[str, Any]:
    return {"type": kind, "sessionID": "ses_1", "part": part}


def step(name: str, given: int, made: int, reason: str = "stop", cost: float = 0) -> dict[str, Any]:
    counts = {"input": given, "output": made, "reasoning": 1, "cache": {"read": 5, "write": 2}}
    return opencode("step_finish", id=name, reason=reason, tokens=counts, cost=cost)


def test_opencode_is_counted_by_step_each_once() -> None:
    lines = [
        opencode("step_start"),
        opencode("tool_use", tool="write", state={"input": {"filePath": "a.txt"}}),
        step("p1", 10, 4, "tool-calls", cost=0.01),
        step("p1", 10, 4, "tool-calls", cost=0.01),
        opencode("text", text="done"),
        step("p2", 20, 6),
    ]
    events, outcome = read("opencode", lines)
    assert events[:2] == [
        SessionKnown(session=Session(id="ses_1", started=True)),
        Acted(tool="write", detail="a.txt"),
    ]
    amounts = [(each.amount, each.has_usd) for each in events if isinstance(each, Used)]
    assert amounts == [
        (Totals(10, 5, 5, 2, 10_000), True),
        (Totals(20, 7, 5, 2), False),
    ]
    assert outcome.text == "done"
    assert outcome.failure is None


def test_opencode_that_stops_after_a_tool_has_no_result() -> None:
    _, outcome = read("opencode", [step("p1", 10, 4, "tool-calls")])
    assert kind(outcome) is FailureKind.CUT


def test_opencode_says_why_it_failed_and_how_long_to_wait() -> None:
    data = {"message": "slow down", "statusCode": 429, "responseHeaders": {"retry-after": "30"}}
    error = {"type": "error", "sessionID": "ses_1", "error": {"name": "APIError", "data": data}}
    _, outcome = read("opencode", [error], code=1)
    assert outcome.failure == Failure(
        kind=FailureKind.RATE_LIMITED, message="slow down", retry_after=30.0
    )


def test_opencode_that_has_shortened_its_context_has_not_failed() -> None:
    error = {"name": "ContextOverflowError", "data": {"message": "too much"}}
    lines = [{"type": "error", "sessionID": "ses_1", "error": error}]
    assert kind(read("opencode", lines, code=1)[1]) is FailureKind.CONTEXT_FULL
    again = [*lines, opencode("text", text="x", synthetic=True), opencode("text", text="ok")]
    _, outcome = read("opencode", [*again, step("p1", 1, 1)])
    assert outcome.failure is None
    assert outcome.text == "ok"


# --- aider ----------------------------------------------------------------------------------------


def aider(event: str, **properties: Any) -> dict[str, Any]:
    return {"event": event, "properties": properties, "user_id": "u", "time": 1}


def test_aider_is_counted_exactly_although_it_prints_rounded_numbers() -> None:
    lines = [
        aider("launched"),
        "Aider v0.86.2",
        aider("message_send_starting"),
        "a.py",
        '{"json": "of the model"}',
        "Tokens: 1.1k sent, 1.0k received. Cost: $0.01 message, $0.01 session.",
        aider("message_send", prompt_tokens=1101, completion_tokens=1020, cost=0.010272),
        aider("exit", reason="Completed"),
    ]
    events, outcome = read("aider", lines)
    assert events[0] == SessionKnown(session=Session(id=ID, started=True))
    assert used(events) == Totals(1101, 1020, usd=10_272)
    assert outcome.text == 'a.py\n{"json": "of the model"}'


def test_aider_that_ends_with_exit_code_0_after_an_error_has_failed() -> None:
    lines = [
        aider("launched"),
        aider("message_send_starting"),
        "litellm.AuthenticationError: AuthenticationError: OpenAIException - the server ",
        "says 401",
        "The API provider is not able to authenticate you. Check your API key.",
        aider("exit", reason="Completed"),
    ]
    _, outcome = read("aider", lines)
    assert kind(outcome) is FailureKind.NOT_AUTHENTICATED


def test_aider_that_tried_again_with_success_has_not_failed() -> None:
    lines = [
        aider("launched"),
        "litellm.RateLimitError: RateLimitError: OpenAIException - slow down",
        "The API provider has rate limited you. Try again later or check your quotas.",
        "Retrying in 0.5 seconds...",
        "done",
        aider("message_send", prompt_tokens=1, completion_tokens=1),
        aider("exit", reason="Completed"),
    ]
    events, outcome = read("aider", lines)
    (waiting,) = [each for each in events if isinstance(each, Waiting)]
    assert (waiting.kind, waiting.seconds) == (FailureKind.RATE_LIMITED, 0.5)
    assert outcome.failure is None
    assert kind(read("aider", lines[:4], code=-9)[1]) is FailureKind.RATE_LIMITED


# --- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_output_in_pieces_is_read_as_in_lines(size: int) -> None:
    lines = codex(100, 60, 20, "a\u2028b\x85c\rd")
    output = "\n".join(json.dumps(each, ensure_ascii=False) for each in lines)
    reader = adapter("codex").reader(Call(prompt="p", folder="/call"))
    events: list[Event] = []
    for start in range(0, len(output), size):
        events += reader.feed(output[start : start + size])
    assert Said(text="a\u2028b\x85c\rd") in events
    assert reader.end(0).text == "a\u2028b\x85c\rd"


def test_a_last_line_without_an_end_is_read_at_the_end() -> None:
    reader = adapter("codex").reader(Call(prompt="p", folder="/call"))
    for each in codex(100, 60, 20)[:-1]:
        reader.feed(json.dumps(each) + "\n")
    reader.feed(json.dumps(codex(100, 60, 20)[-1]))
    outcome = reader.end(0)
    assert outcome.failure is None
    assert outcome.session is not None
    assert outcome.session.counted == Totals(38, 20, 60, 2)
    assert used(outcome.events) == Totals(38, 20, 60, 2)


def test_a_line_without_an_end_takes_no_more_memory_than_the_longest_event() -> None:
    reader = adapter("codex").reader(Call(prompt="p", folder="/call"))
    for _ in range(100):
        assert reader.feed("x" * 1_000_000) == []
    assert reader._length <= 33_000_000
    assert reader.feed("\n" + json.dumps(codex(1, 1, 1)[0]) + "\n")


# --- what is common -------------------------------------------------------------------------------


def test_what_was_used_can_be_spent() -> None:
    event = Used(amount=Totals(40, 20, 60, 7, 1500), model="m", has_usd=True)
    spent = event.spent()
    assert usage_in(spent) == Usage(67, 60, 40, 20, 7, model="m")
    assert (spent["usd"], spent["model"]) == (0.0015, "m")
    assert Used(amount=Totals(1), model="m").spent()["usd"] is None
    assert "usage" not in Used(amount=Totals(usd=5), has_usd=True).spent()


@for_each(
    "text, seconds",
    [
        ("Retrying in 0.5 seconds...", 0.5),
        ("Please retry in 12.5s.", 12.5),
        ("retry after 30", 30.0),
        ("Please try again in 2m", 120.0),
        ("Retry-After: 7", 7.0),
        ("try again in 250ms", 0.25),
        ("try again later", None),
        ("retry in 0 s", None),
        ("retry after 99999999", None),
        ("line 12 failed", None),
    ],
)
def test_texts_say_how_long_to_wait(text: str, seconds: float | None) -> None:
    assert wait_in(text) == seconds


def test_a_rate_limit_is_retried_after_its_wait_and_a_missing_key_is_not() -> None:
    limited = failure_of("status 429, retry after 30 s").error("claude")
    assert isinstance(limited, AgentFailedError)
    assert (limited.error_category, limited.retry_after) == ("RATE_LIMIT", 30.0)
    assert str(limited).startswith("claude: rate limited: status 429")
    no_key = failure_of("Not logged in · Please run /login")
    assert isinstance(no_key.error("claude"), AgentRefusedError)


@for_each(
    "text",
    [
        *("1 of 401 tests failed", "see line 429", "the port is 500", "the error is 401"),
        *("I have added authentication to the login page.", "Users who are not logged in see it."),
        *("at authenticate (file.js:1)", "I raised the quota of the user model."),
        *("The context window of the terminal is drawn.", "The session not found page is done."),
    ],
)
def test_what_a_sentence_is_about_is_no_failure(text: str) -> None:
    assert failure_of(text).kind is FailureKind.FAILED
    for agent in AGENTS:
        _, outcome = read(agent, [text, "Traceback (most recent call last):"], code=1)
        assert kind(outcome) is FailureKind.FAILED


@for_each(
    "code, expected",
    [
        *((401, FailureKind.NOT_AUTHENTICATED), (403, FailureKind.NOT_AUTHENTICATED)),
        *((413, FailureKind.CONTEXT_FULL), (429, FailureKind.RATE_LIMITED)),
        *((500, FailureKind.UNAVAILABLE), (529, FailureKind.UNAVAILABLE)),
        *((200, FailureKind.FAILED), (True, FailureKind.FAILED), ([], FailureKind.FAILED)),
        *(("rate_limit", FailureKind.RATE_LIMITED), ("new_error", FailureKind.FAILED)),
    ],
)
def test_a_code_decides_and_an_unknown_one_says_nothing(code: Any, expected: FailureKind) -> None:
    assert failure_of("it does not say why", code).kind is expected


@for_each(
    "agent, result",
    [
        ("claude", claude_result(subtype="error_during_execution", is_error=True)),
        ("qwen", {"type": "result", "subtype": "error_during_execution", "is_error": True}),
    ],
)
def test_a_failure_is_not_judged_by_what_the_model_said_last(
    agent: str, result: dict[str, Any]
) -> None:
    for said in ("Not logged in · Please run /login", "API Error: 401 is what the test gets"):
        _, outcome = read(agent, [{**result, "result": said}], code=1)
        assert outcome.failure == Failure(kind=FailureKind.FAILED, message=said)


def test_aider_that_ends_in_the_middle_is_not_judged_by_what_its_model_said() -> None:
    said = "Not logged in · Please run /login"
    lines = [aider("message_send_starting"), said, "Error: too many requests", "MemoryError"]
    assert kind(read("aider", lines, code=1)[1]) is FailureKind.FAILED
    limited = "litellm.RateLimitError: RateLimitError: OpenAIException - slow down"
    assert kind(read("aider", [said, limited], code=1)[1]) is FailureKind.RATE_LIMITED


@for_each(
    "agent, line, expected",
    [
        ("codex", "Error: too many requests", FailureKind.RATE_LIMITED),
        (
            "codex",
            "Not inside a trusted directory and --skip-git-repo-check was not specified.",
            None,
        ),
        ("gemini", "[API Error: connection refused]", FailureKind.UNAVAILABLE),
        ("opencode", "the test says: Error: too many requests", FailureKind.FAILED),
        ("opencode", "\x1b[91m\x1b[1mError: \x1b[0mSession not found", FailureKind.NO_SESSION),
    ],
)
def test_an_agent_that_does_not_start_says_why(
    agent: str, line: str, expected: FailureKind | None
) -> None:
    _, outcome = read(agent, ["Loaded cached credentials.", line], code=1)
    assert kind(outcome) is (expected or FailureKind.NOT_PERMITTED)


@for_each(
    "agent, error",
    [
        ("qwen", "Missing API key for OpenAI-compatible auth. Set settings.security.auth.apiKey"),
        ("qwen", "No auth type is selected. Please configure an auth type"),
    ],
)
def test_an_agent_without_a_key_is_not_authenticated(agent: str, error: str) -> None:
    result = {"type": "result", "is_error": True, "error": {"message": error}}
    assert kind(read(agent, [result], code=1)[1]) is FailureKind.NOT_AUTHENTICATED


def test_claude_names_the_error_in_the_message_that_is_about_it() -> None:
    message = {"type": "assistant", "message": {"content": []}, "error": "authentication_failed"}
    result = claude_result(is_error=True, result="Your organization has disabled it")
    assert kind(read("claude", [message, result], code=1)[1]) is FailureKind.NOT_AUTHENTICATED


def test_a_long_message_is_cut_in_its_middle() -> None:
    message = failure_of("start " + "x" * 9_000 + " end").message
    assert len(message) < 2_100
    assert message.startswith("start")
    assert message.endswith("end")


@for_each("agent", AGENTS)
def test_an_agent_that_prints_nothing_has_no_result(agent: str) -> None:
    _, outcome = read(agent, [])
    assert kind(outcome) is FailureKind.CUT


SAMPLES: list[tuple[str, Any]] = [
    *(("claude", each) for each in (claude_init("2.1.326"), *claude_message("a", 1, 1))),
    ("claude", claude_result(modelUsage=by_model(1, 1, 1, 1), permission_denials=[{}], errors=[])),
    *(("codex", each) for each in codex(1, 1, 1)),
    *(("gemini", each) for each in gemini(status="error", error={"message": "{"})),
    *(("qwen", each) for each in qwen("a", "t", qwen_usage(1, 1, 1), qwen_usage(1, 1, 1))),
    ("opencode", step("p", 1, 1)),
    ("opencode", opencode("tool_use", tool="t", state={"status": "error", "error": "permission"})),
    ("opencode", {"type": "error", "error": {"name": "x", "data": {"message": "m"}}}),
    ("aider", aider("message_send", prompt_tokens=1, completion_tokens=1, cost=1)),
]
ODD: list[Any] = [
    *(None, True, -1, 10**400, 1.5, 1e308, "", "x" * 5_000, "--yolo", [], [[]], [None, 1], {}),
    *({"a": {}}, [{"type": "text", "text": 7}], "\ud800"),
]


def altered(value: Any, source: random.Random) -> Any:
    """Return an event with one of its values replaced by something that nobody expects."""
    if not isinstance(value, dict | list) or not value or source.random() < 0.2:
        return source.choice(ODD)
    at = source.choice(list(value) if isinstance(value, dict) else range(len(value)))
    copy: Any = value.copy()
    copy[at] = altered(copy[at], source)
    return copy


@for_each("agent, event", SAMPLES)
def test_an_output_of_another_form_is_never_an_error_of_ours(agent: str, event: Any) -> None:
    source = random.Random(15)
    for _ in range(60):
        lines = [json.dumps(altered(event, source)) for _ in range(3)]
        events, outcome = read(agent, [json.dumps(event), *lines], code=source.choice([0, 1, -9]))
        assert all(part >= 0 for each in events if isinstance(each, Used) for part in each.amount)
        if outcome.session is not None:
            assert Session.from_json(outcome.session.to_json()) == outcome.session


@for_each("agent", AGENTS)
def test_lines_that_are_no_events_are_skipped(agent: str) -> None:
    deep = '{"a":' * 100_000
    lines = ["", "\0", "prose", "{", deep, "[1]", '"text"', "{}", '{"type": "new"}', "x" * 10**6]
    events, _ = read(agent, lines)
    assert not [each for each in events if not isinstance(each, Said)]
