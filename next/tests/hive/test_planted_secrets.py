"""Planted secrets are in nothing that people read: inputs, errors, tracebacks, streams, copies.

What a run is resumed from has them: its arguments, results, answers, and what its steps save.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.journal.entries import AttemptFailed, AttemptStarted, CancelRequested, RunEnded
from maestro_hive.journal.redacted_entries import redact_json
from maestro_hive.kernel import redaction
from maestro_hive.kernel.errors import ConfigurationError, RunFailedError
from maestro_hive.kernel.redaction import mark_secret
from tests.hive.conftest import quick_hive, recorded, store_of
from tests.planted_secrets import MARKED, SHAPED, SURROUNDED, VARIABLE, VARIABLE_VALUE, fragments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.hive.hive import Hive

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
    monkeypatch.setattr(redaction, "_KNOWN", redaction._Known())  # noqa: SLF001
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
            shown = "".join(traceback.format_exception(error))
            stream.write(f"{record.msg} {record.args!r} {shown}\n")

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


def stored(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_the_planted_text_has_every_secret() -> None:
    assert len(leaked(TEXT)) == len(PLANTED) + len(SURROUNDED)


def failing(hive: Hive) -> Any:
    """Return a workflow that fails, with secrets in inputs, results and a chain of errors."""

    @hive.step(max_attempts=2)
    async def fail(text: str, found: dict[str, Any]) -> None:
        first, second = KeyError(text), ConnectionError(f"refused: {text}")
        first.add_note(f"noted: {text}")
        second.__cause__ = first
        raise RuntimeError("it failed: " + text, text.encode(), found) from second

    @hive.workflow(name="planted")
    async def workflow() -> None:
        await fail(TEXT, {"found": TEXT, "data": TEXT.encode(), "list": [TEXT]})

    return workflow


def test_no_secret_of_a_run_that_fails_is_recorded(folder: Path) -> None:
    shown: list[str] = []
    texts: list[str] = []
    for _ in range(2):  # the second time, from the journal
        with quick_hive(folder) as hive:
            with pytest.raises(RunFailedError) as failed:
                hive.run_sync(failing(hive), run_id=RUN)
            shown.append("".join(traceback.format_exception(failed.value)))
            texts = [text for _, text in store_of(hive).texts(store_of(hive).find(RUN).number)]
    assert leaked("\n".join(texts)) == []
    assert "[redacted]" in texts[1]
    assert leaked(stored(folder).decode(errors="replace")) == []
    for each in shown:
        assert leaked(each) == []
        assert "it failed: value [redacted]" in each
        assert f"[redacted:{VARIABLE}]" in each
        assert "ConnectionError: refused: value [redacted]" in each
        assert "noted: value [redacted]" in each


def test_no_secret_is_in_a_log_line_of_a_run_that_fails(hive: Hive, log: io.StringIO) -> None:
    with pytest.raises(RunFailedError):
        hive.run_sync(failing(hive), run_id=RUN)
    assert "it failed: value [redacted]" in log.getvalue()
    assert "Traceback" in log.getvalue()
    assert leaked(log.getvalue()) == []


def test_the_next_attempt_gets_the_feedback_without_secrets(hive: Hive) -> None:
    @hive.step(max_attempts=2)
    async def learn() -> list[str]:
        if not current().feedback:
            raise RuntimeError(f"refused {SHAPED['github']}")
        return current().feedback

    @hive.workflow
    async def workflow() -> list[str]:
        return await learn()

    (said,) = hive.run_sync(workflow, run_id=RUN)
    assert "refused [redacted]" in said
    (failed,) = [each for each in recorded(hive, RUN) if isinstance(each, AttemptFailed)]
    assert said == failed.feedback


def test_what_a_run_is_resumed_from_has_the_real_values(folder: Path) -> None:
    """A token that a step returns is used by the next one, in each life."""

    def run(hive: Hive) -> Any:
        @hive.step(persona="clerk")
        async def fetch(text: str) -> dict[str, Any]:
            current().memory["token"] = text
            current().save_progress(token=text)
            return {"found": text, "remembered": current().memory["token"]}

        @hive.workflow(name="planted")
        async def workflow(text: str) -> list[Any]:
            found = await fetch(text)
            return [found, text, await fetch(found["found"] + "!")]

        return hive.run_sync(workflow, TEXT, run_id=RUN)

    with quick_hive(folder) as hive:
        first = run(hive)
        (started, again) = (each for each in recorded(hive, RUN) if type(each) is AttemptStarted)
        assert leaked(store_of(hive).text(RUN, started.input).decode()) == []
        assert started.identity != again.identity
    assert first[0] == {"found": TEXT, "remembered": TEXT}
    assert first[1:] == [TEXT, {"found": TEXT + "!", "remembered": TEXT + "!"}]
    with quick_hive(folder) as hive:
        assert run(hive) == first


def test_calls_that_differ_in_a_secret_alone_are_two_steps(folder: Path) -> None:
    calls: list[str] = []
    secrets = [SHAPED["github"], SHAPED["github-app"]]

    def run(hive: Hive) -> Any:
        @hive.step
        async def use(token: str) -> int:
            calls.append(token)
            return len(calls)

        @hive.workflow
        async def workflow() -> list[int]:
            return [await use(each) for each in secrets]

        return hive.run_sync(workflow, run_id=RUN)

    for _ in range(2):
        with quick_hive(folder) as hive:
            assert run(hive) == [1, 2]
    assert calls == secrets


def test_no_secret_is_in_a_stream(folder: Path) -> None:
    with quick_hive(folder) as hive:

        @hive.step
        async def draft() -> None:
            current().write(TEXT)

        @hive.workflow
        async def work() -> None:
            await draft()

        async def main() -> str:
            await hive.run(work, run_id=RUN)
            return "".join([str(each.data) async for each in hive.stream(RUN)])

        streamed = asyncio.run(main())
    assert "[redacted]" in streamed
    assert leaked(streamed) == []
    database = (folder / "journal.db").read_bytes().decode(errors="replace")
    assert leaked(database) == []


def test_no_secret_is_in_the_reason_of_a_cancelled_run(hive: Hive) -> None:
    @hive.workflow
    async def workflow() -> None:
        await asyncio.sleep(1000)

    async def main() -> None:
        handle = await hive.start(workflow, run_id=RUN)
        handle.cancel(f"it has shown {SHAPED['github']}")
        await asyncio.wait([asyncio.ensure_future(handle.result())])

    asyncio.run(main())
    reasons = [
        each.reason for each in recorded(hive, RUN) if isinstance(each, CancelRequested | RunEnded)
    ]
    assert set(reasons) == {"it has shown [redacted]"}


def test_bytes_with_a_secret_are_replaced_as_a_whole() -> None:
    secret = base64.b64encode(SHAPED["github"].encode())
    tagged = b'[{"$":"bytes","v":"%s"},{"$":"tuple","v":["%s"]},1]'
    assert redact_json(tagged % (secret, secret)) == (
        b'["[redacted]",{"$":"tuple","v":["[redacted]"]},1]'
    )


def test_a_value_without_secrets_stays_as_it_is() -> None:
    data = b'[ {"$":"bytes","v":"AAAA"},"\\u00e4", 1.0]'
    assert redact_json(data) is data


@pytest.mark.timing
def test_a_large_input_is_searched_in_half_a_second() -> None:
    data = base64.b64encode(bytes(range(256)) * 30_000)
    before = time.process_time()
    redact_json(b'["%s"]' % data)
    assert time.process_time() - before < 0.5


# --- redact --------------------------------------------------------------------------------------


def test_a_redacted_argument_is_not_stored_and_counts_for_the_identity(folder: Path) -> None:
    calls: list[str] = []
    with quick_hive(folder) as hive:

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
        started = [each for each in recorded(hive, RUN) if isinstance(each, AttemptStarted)]
        given = store_of(hive).text(RUN, started[0].input)
    assert result == ["hello ada", "hello ada", "ada is not [redacted]"]
    assert calls == ["correct horse", "battery staple", "wrong horse 17"]
    assert b'"ada","[redacted]"' in given
    written = stored(folder)
    assert b"hello ada" in written
    for password in calls:
        assert password.encode() not in written


def test_redact_true_stores_no_input_and_the_result_as_it_is(folder: Path) -> None:
    calls: list[str] = []
    for _ in range(2):
        with quick_hive(folder) as hive:

            @hive.step(redact=True)
            async def exchange(code: str) -> str:
                calls.append(code)
                return f"token for {len(code)}"

            @hive.workflow(name="planted")
            async def workflow() -> str:
                return await exchange("the one-time code")

            assert hive.run_sync(workflow, run_id=RUN) == "token for 17"
    assert calls == ["the one-time code"]
    assert b"one-time code" not in stored(folder)


async def log_out() -> None: ...


def test_a_name_that_is_no_argument_is_refused(hive: Hive) -> None:
    with pytest.raises(
        ConfigurationError, match="redact names 'passwort', which is not an argument"
    ):

        @hive.step(redact=("passwort",))
        async def log_in(user: str, password: str) -> None: ...

    with pytest.raises(ConfigurationError, match="True, False, or a tuple with the names"):
        hive.step(redact="password")(log_out)  # type: ignore[call-overload]
