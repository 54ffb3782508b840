"""Planted secrets are in nothing that leaves the process: logs, exports, reports, tickets, tracebacks."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import (
    ExecutionConfig,
    GovernanceViolation,
    Hive,
    SafetyRetryWrapper,
    current,
    mark_secret,
)
from maestro_hive.hive import keeping_escalations
from maestro_hive.kernel import redaction
from maestro_hive.unified_execution import PersonaExecutor
from tests.cli.processes import complaint, maestro
from tests.hive.conftest import quick_config
from tests.jira_server import JiraServer
from tests.planted_secrets import (
    MARKED,
    SHAPED,
    SURROUNDED,
    VARIABLE,
    VARIABLE_VALUE,
    fragments,
)
from tests.timing import PATIENCE_SECONDS
from tests.webhook_server import WebhookServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.engine.escalation import EscalationCase
    from tests.loopback_server import LoopbackServer

#: Every secret that is planted, as it is and in base64.
PLANTED = [*SHAPED.values(), VARIABLE_VALUE, MARKED]
TEXT = "\n".join(
    [
        *(f"value {secret}" for secret in PLANTED),
        *(f"encoded {base64.b64encode(secret.encode()).decode()}" for secret in PLANTED),
        *(text for text, _ in SURROUNDED.values()),
    ]
)
RUN = "planted"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_KNOWN", redaction._Known())
    monkeypatch.setenv(VARIABLE, VARIABLE_VALUE)
    mark_secret(MARKED)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Collect what is logged from DEBUG on, as a handler formats it, and what each record has."""
    stream = io.StringIO()

    class Everything(logging.StreamHandler[io.StringIO]):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            error = record.exc_info[1] if record.exc_info else None
            stream.write(
                f"{record.msg} {record.args!r} {''.join(traceback.format_exception(error))}\n"
            )

    handler, logger = Everything(stream), logging.getLogger("maestro_hive")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def leaked(text: str) -> list[str]:
    """Return which secrets a text has, or parts of them."""
    secrets = {secret: fragments(secret) for secret in PLANTED}
    secrets |= {whole: {part} for whole, part in SURROUNDED.values()}
    return [secret for secret, parts in secrets.items() if any(part in text for part in parts)]


def test_the_planted_text_has_every_secret() -> None:
    assert len(leaked(TEXT)) == len(PLANTED) + len(SURROUNDED)
    assert len(leaked(json.dumps(TEXT))) >= len(SHAPED)


def failing(state: Path) -> Hive:
    """Return a hive with a run that failed: with secrets in arguments, results and a chain of errors."""
    config = quick_config()
    config.log_level = "DEBUG"
    hive = Hive(state, config)

    @hive.step
    async def fetch(text: str) -> dict[str, Any]:
        return {"found": text, "data": text.encode(), "password": "hunter2", "list": [text]}

    @hive.step(max_attempts=2)
    async def fail(found: dict[str, Any]) -> None:
        first, second = KeyError(found["found"]), ConnectionError(f"refused: {found['found']}")
        first.add_note(f"noted: {found['found']}")
        second.__cause__ = first
        raise RuntimeError("it failed: " + found["found"]) from second

    @hive.workflow(name="planted")
    async def workflow(text: str) -> None:
        await fail(await fetch(text))

    with pytest.raises(Exception, match="it failed"):
        hive.run_sync(workflow, TEXT, run_id=RUN)
    return hive


def test_no_secret_is_in_a_log_line_of_a_run_that_fails(tmp_path: Path, log: io.StringIO) -> None:
    failing(tmp_path)
    text = log.getvalue()
    assert "run planted failed: RuntimeError: it failed: value [redacted]" in text
    assert "Traceback" in text
    assert leaked(text) == []


def test_no_secret_is_in_an_export_or_printed_by_a_verb(tmp_path: Path) -> None:
    failing(tmp_path)
    verbs = [
        ("export", RUN, "-"),
        *((verb, *more) for verb in ("show", "events") for more in ((RUN,), (RUN, "--json"))),
        ("show", RUN, "fetch"),
        ("show", RUN, "fail"),
        ("show", RUN, "fail", "--json"),
        ("show", RUN, "nothing", "--debug"),
        ("runs", "--json"),
    ]
    for verb in verbs:
        done = maestro(*verb, "--store", tmp_path)
        printed = done.stdout + done.stderr
        assert leaked(printed) == [], verb
        assert "hunter2" not in printed, verb
        if verb[0] in {"export", "show"} and "nothing" not in verb:
            assert "[redacted]" in printed, verb
            assert f"[redacted:{VARIABLE}]" in printed, verb


def test_with_values_everything_is_printed_and_exported(tmp_path: Path) -> None:
    failing(tmp_path)
    done = maestro("show", RUN, "fetch", "--json", "--with-values", "--store", tmp_path)
    assert json.loads(done.stdout)["step"]["output"]["found"] == TEXT
    done = maestro("export", RUN, "-", "--with-values", "--store", tmp_path)
    assert SHAPED["anthropic"] in done.stdout


def test_a_redacted_export_says_so_and_is_not_imported(tmp_path: Path) -> None:
    failing(tmp_path / "old")
    file = tmp_path / "run.json"
    done = maestro("export", RUN, file, "--store", tmp_path / "old")
    assert "--with-values keeps them" in done.stderr
    document = json.loads(file.read_text())["document"]
    assert document["redacted"] is True
    assert document["kind"] == "redacted_run"
    kinds = [entry["kind"] for entry in document["run"]["entries"]]
    assert "step_completed" in kinds
    assert not any("sha256" in entry for entry in document["run"]["entries"])
    message = complaint(maestro("import", file, "--store", tmp_path / "new"), code=2)
    assert "is a redacted export" in message
    assert "--with-values" in message
    assert not (tmp_path / "new").exists()
    whole = tmp_path / "whole.json"
    assert (
        maestro("export", RUN, whole, "--with-values", "--store", tmp_path / "old").returncode == 0
    )
    assert maestro("import", whole, "--store", tmp_path / "new").returncode == 0


def test_maestro_run_prints_the_real_result_and_no_secret_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaky.py").write_text(
        "from maestro_hive import Hive\n"
        f"hive = Hive({str(tmp_path / 'state')!r})\n"
        "@hive.workflow\n"
        "async def leaky(text: str) -> str:\n"
        "    return text\n"
        "@hive.workflow\n"
        "async def failing(text: str) -> str:\n"
        "    raise RuntimeError(text)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for more in ([], ["--json"], ["-vv"], ["--debug"]):
        done = maestro("run", "leaky:leaky", TEXT, *more)
        printed = json.loads(done.stdout)["result"] if more == ["--json"] else done.stdout[:-1]
        assert printed == TEXT, more
        assert leaked(done.stderr) == [], more
        done = maestro("run", "leaky:failing", TEXT, *more)
        assert leaked(done.stdout + done.stderr) == [], more
        assert "[redacted]" in done.stdout + done.stderr, more


def test_no_secret_is_in_an_escalation(tmp_path: Path) -> None:
    cases: list[EscalationCase] = []

    class Recording:
        async def escalate(self, case: EscalationCase) -> str:
            cases.append(case)
            return "T-1"

    def task(text: str) -> None:
        raise RuntimeError("it failed: " + text) from ValueError(text)

    config = config_in(tmp_path)
    wrapper = SafetyRetryWrapper(config, workflow_id=RUN, escalation=Recording())
    with pytest.raises(Exception, match="failed"):
        asyncio.run(wrapper.execute_safe(task, TEXT, task_name="planted"))
    (case,) = cases
    assert "[redacted]" in case.description
    assert leaked(repr(case)) == []
    assert leaked(json.dumps(case.failure_report.to_dict())) == []


#: In pieces, since a ticket has the start of a long error only; and as a whole, which is shortened.
_SECRETS = [*(text for text, _ in SURROUNDED.values()), *PLANTED]
PIECES = ["\n".join(_SECRETS[first::4]) for first in range(4)] + [TEXT]


def escalated(hive: Hive, answer: Callable[[], object]) -> None:
    """Fail with each piece in a run of its own; when a person was told of each, ``answer``."""

    @hive.step(escalate=True, max_attempts=1)
    async def fail(text: str) -> None:
        if not current().feedback:
            raise RuntimeError(f"it failed: {text}") from ValueError(text)

    @hive.workflow
    async def release(text: str) -> None:
        await fail(text)

    async def main() -> None:
        handles = [await hive.start(release, piece) for piece in PIECES]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(each.delivered for each in hive.escalations()) < len(PIECES):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        answer()
        await asyncio.gather(*(handle.result() for handle in handles))

    with hive:
        asyncio.run(main())


def received(server: LoopbackServer) -> str:
    """Return every text that a server received, also as it reads without JSON's escapes."""

    def texts(found: Any) -> Iterator[str]:
        if isinstance(found, str):
            yield found
        elif isinstance(found, dict):
            yield from (text for each in found.values() for text in texts(each))
        elif isinstance(found, list):
            yield from (text for each in found for text in texts(each))

    read = [text for each in server.requests for text in texts(each.json())]
    raw = [f"{each.path} {each.query} {each.raw.decode()}" for each in server.requests]
    return "\n".join([*read, *raw])


@pytest.mark.parametrize("version", [3, 2])
def test_no_secret_arrives_in_tickets_and_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(keeping_escalations, "SYNC_SECONDS", 0.05)
    monkeypatch.setattr(keeping_escalations, "_POLL_SECONDS", 0.02)
    with JiraServer(tmp_path / "jira", version=version) as server:
        settings = {"jira_index_lag_seconds": 0.1, "ticket_answerers": ["*"], **server.settings}
        config = replace(quick_config(), **settings)

        def answer() -> None:
            for ticket in server.tickets():  # what a person pastes is repeated in the outcome
                server.add_comment(ticket["key"], f"take {SHAPED['github']} and {MARKED}")
                server.resolve(ticket["key"])

        escalated(Hive(tmp_path / "state", config), answer)
        text = received(server)
    assert "answered: take" in text.replace("\\", "")
    assert "[redacted]" in text.replace("\\", "")
    assert leaked(text) == []
    assert leaked(text.replace("\\", "")) == []  # without the escapes of wiki markup


def test_no_secret_arrives_at_a_webhook(tmp_path: Path) -> None:
    with WebhookServer() as server:
        settings: dict[str, Any] = {
            "webhook_url": server.address,
            "webhook_secret": "what signs it",
        }
        config = replace(quick_config(), **settings)
        hive = Hive(tmp_path / "state", config)

        def answer() -> None:
            for each in hive.escalations():
                hive.answer_escalation(each.id, f"take {SHAPED['github']}")

        escalated(hive, answer)
        text = received(server)
        assert len(server.requests) >= len(PIECES)
    assert "[redacted]" in text
    assert leaked(text) == []


def config_in(folder: Path) -> ExecutionConfig:
    config = quick_config()
    config.state.state_dir = str(folder)
    return config


# --- redact --------------------------------------------------------------------------------------


def journal(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_redacted_argument_is_not_stored_and_counts_for_the_identity(tmp_path: Path) -> None:
    calls: list[str] = []
    hive = Hive(tmp_path, quick_config())

    @hive.step(redact=("password",), max_attempts=1)
    async def log_in(user: str, password: str, again: bool = False) -> str:
        calls.append(password)
        if again:
            raise PermissionError(f"{user} is not {password}")
        return f"hello {user}"

    @hive.workflow(name="planted")
    async def workflow() -> list[str]:
        first = await log_in("ada", "correct horse")
        second = await log_in("ada", password="battery staple")
        try:
            await log_in("ada", "wrong horse 17", again=True)
        except PermissionError as error:
            return [first, second, str(error)]
        return []

    result = hive.run_sync(workflow, run_id=RUN)
    assert result == ["hello ada", "hello ada", "ada is not [redacted]"]
    assert calls == ["correct horse", "battery staple", "wrong horse 17"]
    stored = journal(tmp_path)
    assert b"hello ada" in stored
    for password in calls:
        assert password.encode() not in stored
    shown = json.loads(maestro("show", RUN, "log_in", "--json", "--store", tmp_path).stdout)["step"]
    assert shown["input"]["args"] == ["ada", "[redacted]"]
    assert shown["output"] == "hello ada"


def test_redact_true_stores_no_input_and_shows_no_result(tmp_path: Path) -> None:
    hive = Hive(tmp_path, quick_config())

    @hive.step(redact=True)
    async def exchange(code: str) -> str:
        return f"token for {code}"

    @hive.workflow(name="planted")
    async def workflow() -> int:
        return len(await exchange("the one-time code"))

    assert hive.run_sync(workflow, run_id=RUN) == len("token for the one-time code")
    assert hive.run_sync(workflow, run_id=RUN) == len("token for the one-time code")
    for verb in (
        ("show", RUN, "exchange"),
        ("show", RUN, "exchange", "--json"),
        ("export", RUN, "-"),
    ):
        printed = maestro(*verb, "--store", tmp_path).stdout
        assert "[redacted]" in printed, verb
        assert "one-time code" not in printed, verb
    shown = maestro("show", RUN, "exchange", "--json", "--with-values", "--store", tmp_path).stdout
    assert json.loads(shown)["step"]["output"] == "[redacted]"
    assert json.loads(shown)["step"]["input"] is None


def test_an_executor_leaves_redacted_arguments_out(tmp_path: Path) -> None:
    def log_in(user: str, password: str) -> str:
        raise PermissionError(f"{user} is not {password}")

    config = config_in(tmp_path)
    executor = PersonaExecutor(config, "doorkeeper", workflow_id=RUN).options(redact=("password",))
    with pytest.raises(Exception, match="ada is not"):
        asyncio.run(executor.execute(log_in, "log_in", "ada", "battery staple"))
    stored = journal(tmp_path)
    assert b"ada is not [redacted]" in stored
    assert b"battery staple" not in stored


async def log_out() -> None: ...


def test_a_name_that_is_no_argument_is_refused(tmp_path: Path) -> None:
    hive = Hive(tmp_path, quick_config())
    with pytest.raises(Exception, match="to redact passwort, and has no such argument"):

        @hive.step(redact=("passwort",))
        async def log_in(user: str, password: str) -> None: ...

    with pytest.raises(Exception, match="True, False, or a tuple with the names of arguments"):
        hive.step(redact="password")(log_out)  # type: ignore[call-overload]


def test_an_audit_log_has_no_secret_and_is_verified(tmp_path: Path) -> None:
    class Talkative:
        """An enforcer that repeats what it is asked about."""

        def check(self, target_path: str | None = None, **_: Any) -> Any:
            if target_path == "fails":
                raise OSError(TEXT)
            found = {"allowed": True, "message": TEXT, "latency_ms": OSError(TEXT)}
            return type("Verdict", (), found)()

    with Hive(tmp_path, quick_config(), enforcer=Talkative()) as hive:  # type: ignore[arg-type]

        @hive.step
        async def write_file(path: str) -> None: ...

        @hive.workflow
        async def write() -> list[str]:
            await write_file(f"notes/{SHAPED['github']}.txt")
            try:
                await write_file("fails")
            except GovernanceViolation as error:
                return [error.violation_type]
            return []

        assert hive.run_sync(write, run_id=RUN) == ["enforcer_failed"]
    text = (tmp_path / "audit.jsonl").read_text()
    assert leaked(text) == []
    assert [json.loads(line)["allowed"] for line in text.splitlines()] == [True, False]
    assert (
        "2 lines, as written, and complete"
        in maestro("--store", tmp_path, "audit", "verify").stdout
    )
