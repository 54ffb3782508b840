"""Secrets are replaced in texts and values; everything else is left as it is."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

import maestro_hive
from maestro_hive.kernel import redaction
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.redaction import mark_secret, redact_text, redact_value
from tests.planted_secrets import MARKED, SHAPED, SURROUNDED, VARIABLE, VARIABLE_VALUE, encoded
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_KNOWN", redaction._Known())  # noqa: SLF001 - of the process


# --- shapes --------------------------------------------------------------------------------------


@for_each("name", SHAPED)
def test_a_key_is_found_by_its_shape(name: str) -> None:
    secret = SHAPED[name]
    assert redact_text(secret) == "[redacted]"
    assert redact_text(f"before {secret} after") == "before [redacted] after"
    assert redact_text(f"key={secret}, 'other': 'x'") == "key=[redacted], 'other': 'x'"


@for_each("name", SURROUNDED)
def test_a_secret_is_found_by_what_is_around_it(name: str) -> None:
    text, secret = SURROUNDED[name]
    redacted = redact_text(f"call failed: {text} (twice)")
    assert secret not in redacted
    assert redacted.startswith("call failed: ")
    assert redacted.endswith(" (twice)")
    assert "[redacted]" in redacted


@for_each("secret", SHAPED.values(), ids=SHAPED)
def test_an_encoded_key_is_found_by_its_shape(secret: str) -> None:
    for how, text in encoded(secret).items():
        redacted = redact_text(f"< {text} >")
        assert "[redacted]" in redacted, how
        assert redacted.startswith("< "), how
        assert redacted.endswith(" >"), how
        assert secret[:24] not in redacted, how
        assert text.strip('"')[4:40] not in redacted, how


def test_a_key_after_an_escape_or_a_colour_is_found() -> None:
    secret = SHAPED["anthropic"]
    for before in ("\\n", "\\t", "\\x00", "\\u003d", "\x1b[31m", "\x1b[m", "é", "_"):
        assert redact_text(before + secret) == f"{before}[redacted]"


def test_a_private_key_whose_end_was_cut_off_is_removed_with_its_lines() -> None:
    cut = SHAPED["private-key"][:150]
    assert redact_text(f"{cut}\n") == "[redacted]\n"
    assert redact_text(json.dumps(cut)) == '"[redacted]"'


def test_a_password_in_an_address_is_removed_and_the_rest_is_readable() -> None:
    text = "cannot reach https" + "://ada:l0velace@example.com/path?q=1"
    assert redact_text(text) == "cannot reach https://ada:[redacted]@example.com/path?q=1"


def test_what_documents_write_for_a_password_stays() -> None:
    for password in (
        "password",
        "***",
        "${PASSWORD}",
        "<password>",
        "{password}",
        "xxx",
        "%s",
        "…",
    ):
        text = f"postgresql://user:{password}@host/app"
        assert redact_text(text) == text


def test_what_was_redacted_is_not_changed_by_redacting_it_again() -> None:
    for text in (*SHAPED.values(), *(text for text, _ in SURROUNDED.values())):
        once = redact_text(text)
        assert redact_text(once) == once


# --- values that are known -----------------------------------------------------------------------


def test_the_value_of_a_variable_that_sounds_secret_is_replaced_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, VARIABLE_VALUE)
    assert redact_text(f"it is {VARIABLE_VALUE}!") == f"it is [redacted:{VARIABLE}]!"
    for how, text in encoded(VARIABLE_VALUE).items():
        assert "[redacted:PLANTED_API_KEY]" in redact_text(f"< {text} >"), how
    key = SHAPED["openai"]
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert redact_text(f"Bearer {key}") == "Bearer [redacted:OPENAI_API_KEY]"


def test_the_environment_is_read_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "first-value-1 second-value-2"
    assert redact_text(text) == text
    monkeypatch.setenv("SOME_TOKEN", "first-value-1")
    assert redact_text(text) == "[redacted:SOME_TOKEN] second-value-2"
    monkeypatch.setenv("SOME_TOKEN", "second-value-2")
    assert redact_text(text) == "first-value-1 [redacted:SOME_TOKEN]"
    monkeypatch.delenv("SOME_TOKEN")
    assert redact_text(text) == text


def test_the_folder_of_the_shell_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PWD", "OLDPWD"):
        monkeypatch.setenv(name, "/home/ada/My Project")
    assert redact_text("in /home/ada/My Project") == "in /home/ada/My Project"


@pytest.mark.parametrize(
    "name",
    "API_KEY KEY SECRET_KEY_BASE GH_TOKEN TOKEN DB_PASSWORD PGPASSWORD MYSQL_PWD X_PASSWD"
    " GCP_CREDENTIALS NPM_AUTH PRIVATE_THING SENTRY_DSN AWS_SECRET_ACCESS_KEY apiKey"
    " JIRA_API_TOKEN".split(),
)
def test_names_that_sound_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "v4lue-of-it")
    assert redact_text("(v4lue-of-it)") == f"([redacted:{name}])"


@pytest.mark.parametrize(
    "name",
    "GIT_AUTHOR_NAME KEYBOARD MONKEY TOKENIZER MAX_TOKENS TOKEN_FILE SSH_AUTH_SOCK JIRA_PROJECT_KEY"
    " PUBLIC_KEY AUTH_URL PASSWORD_POLICY COMPASS HOME".split(),
)
def test_names_that_do_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "v4lue-of-it")
    assert redact_text("(v4lue-of-it)") == "(v4lue-of-it)"


@pytest.mark.parametrize(
    "value",
    ["true", "12345", "86400000", "1.5e6", "120min", "/usr/lib/keys", "~/.ssh/id", "./key.pem",
     "/secrets", "default", "postgres", "disabled", "https://login.example.com/token", "short"],
)  # fmt: skip
def test_ordinary_values_are_no_secrets(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", value)
    assert redact_text(f"it says {value} here") == f"it says {value} here"


def test_the_password_of_a_connection_string_is_known_whatever_the_variable_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql" + "://ada:l0ve%2Flace@db/app")
    monkeypatch.setenv("ORM", "host=db user=ada password=b4bbage;timeout=3")
    found = redact_text("l0ve/lace, l0ve%2Flace and b4bbage")
    assert found == "[redacted:DATABASE_URL], [redacted:DATABASE_URL] and [redacted:ORM]"


def test_a_marked_value_is_replaced() -> None:
    assert maestro_hive.mark_secret(MARKED) == MARKED
    assert redact_text(f"({MARKED})") == "([redacted])"
    for how, text in encoded(MARKED).items():
        assert "[redacted]" in redact_text(text), how


@for_each("value", ["", "abc", "  a  ", None, 17])
def test_what_cannot_be_marked_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="at least 4 characters"):
        mark_secret(value)  # type: ignore[arg-type]


# --- values --------------------------------------------------------------------------------------


def test_a_value_is_walked_and_what_is_under_a_secret_name_is_replaced() -> None:
    key = SHAPED["github"]
    value = {
        "password": "x",
        "apiKey": "short",
        "headers": {"X-Api-Key": "abc", "Accept": "text/html"},
        "credentials": {"user": "ada", "pin": 1234, "empty": "", "ready": True, "none": None},
        "texts": [f"a {key}", ("b", key)],
        key: 1,
    }
    assert redact_value(value) == {
        "password": "[redacted]",
        "apiKey": "[redacted]",
        "headers": {"X-Api-Key": "[redacted]", "Accept": "text/html"},
        "credentials": {
            "user": "[redacted]", "pin": "[redacted]", "empty": "", "ready": True, "none": None,
        },
        "texts": ["a [redacted]", ("b", "[redacted]")],
        "[redacted]": 1,
    }  # fmt: skip


def test_names_of_ours_and_counts_stay() -> None:
    value = {
        "effect_key": "b1946ac92492d2347c6235b4d2611184",
        "key": "invoice-17",
        "tokens": 4096,
        "max_tokens": 100,
        "author": "Ada",
        "token_count": 3,
        "data": [1, 2.5, None, True],
    }
    assert redact_value(value) == value


# --- what is left as it is -----------------------------------------------------------------------


def test_hashes_ids_and_data_stay() -> None:
    digest = hashlib.sha256(b"x")
    text = "\n".join(
        [
            hashlib.sha1(b"x").hexdigest(),
            digest.hexdigest(),
            f"sha256:{digest.hexdigest()}",
            base64.b64encode(digest.digest()).decode(),
            base64.b64encode(bytes(range(256)) * 20).decode(),
            str(uuid.UUID(int=314159265358979)),
            "maestro_hive.kernel.redaction.test_a_finished_step_is_not_run_again",
            "task-force risk-averse-and-long-words-here sk-learn-is-a-name-with-words",
            "https://example.com/a/very/long/path/to/something?x=1&y=%20%41%7E#part",
            "Bearer authentication and Basic authorization are described there",
            "2026-11-18T01:02:03.456789+00:00",
        ]
    )
    assert redact_text(text) == text


def test_no_file_of_this_project_is_changed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py", "*.md", "*.toml"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    changed = {}
    for name in filter(None, listed.split("\0")):
        text = (ROOT / name).read_bytes().decode(errors="replace")
        redacted = redact_text(text)
        if redacted != text:
            lines = zip(text.splitlines(), redacted.splitlines(), strict=False)
            changed[name] = [after for before, after in lines if before != after]
    # They are about secrets, and have some.
    about = {"tests/planted_secrets.py", "tests/unit/test_redaction.py"}
    assert changed.keys() <= about, changed


# --- time ----------------------------------------------------------------------------------------


def _hostile() -> Iterator[tuple[str, str]]:
    """Yield texts that a pattern could take quadratic time for: starts of secrets in a row."""
    yield "keys", "sk-" * 100
    yield "dashes", "-sk-a" * 60
    yield "web tokens", "-eyJ" * 80
    yield "web tokens with dots", "eyJaaaaaa." * 40
    yield "frames", "-----BEGIN PRIVATE KEY-----" * 12
    yield "frames with lines", "-----BEGIN PRIVATE KEY-----\nAAAAAAAAAAAAAAAAAAAA\n-" * 6
    yield "addresses", "://a:b" * 50
    yield "users", "://" + "a" * 300
    yield "headers", "Authorization: Bearer " * 15
    yield "access keys", ("AKIA" + "A" * 16 + " ") * 15
    yield "slack", "xoxb-" * 60
    yield "percent", "%41" * 100
    yield "percent percent", "%2541" * 60
    yield "letters", "a" * 300
    yield "lines", ("A" * 76 + "\n") * 4
    yield "padding", "A=" * 150
    yield "spaces", "authorization" + " " * 300
    yield "dots", "SG." + "a" * 300


@pytest.mark.parametrize("name,unit", [*_hostile()])
def test_no_text_takes_more_than_its_share_of_time(name: str, unit: str) -> None:
    # Quadratic time would be 64 times as long for 8 times the text, and seconds for the larger one.
    small, large = (unit * (size // len(unit)) for size in (16_000, 128_000))
    redact_text(unit)
    assert _cpu_seconds(large) < 32 * max(_cpu_seconds(small), 0.002)


def test_a_megabyte_takes_a_fraction_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        monkeypatch.setenv(f"SERVICE_{number}_TOKEN", f"v4lue-number-{number}")
    sources = itertools.chain.from_iterable(
        path.read_text() for path in sorted((ROOT / "src/maestro_hive").rglob("*.py"))
    )
    text = "".join(itertools.islice(sources, 1_000_000))
    assert _cpu_seconds(text) < 0.5  # 0.05 on a machine with nothing else to do


def _cpu_seconds(text: str) -> float:
    """Return the CPU time that a text takes at best."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        redact_text(text)
        best = min(best, time.process_time() - start)
    return best


def test_an_address_in_percent_codes_loses_its_password_only() -> None:
    text = quote("https" + "://ada:l0velace@example.com/", safe="")
    assert redact_text(text) == "https%3A%2F%2Fada%3A[redacted]%40example.com%2F"


# --- beyond the promise --------------------------------------------------------------------------


def test_a_secret_that_was_encoded_twice_is_not_searched_for() -> None:
    twice = base64.b64encode(base64.b64encode(SHAPED["anthropic"].encode())).decode()
    assert redact_text(twice) == twice


# --- what is logged ------------------------------------------------------------------------------


def test_all_loggers_of_the_package_replace_secrets() -> None:
    """They are made by ``kernel.logs``, whose loggers do; see test_logs.py."""
    makers = [
        path.name
        for path in (ROOT / "src" / "maestro_hive").rglob("*.py")
        if "getLogger(" in path.read_text(encoding="utf-8")
    ]
    assert makers == ["logs.py"]
