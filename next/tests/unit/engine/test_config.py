"""Settings: their defaults, their environment, their limits, and copies that stay as they are.

Which folders they lead to is in test_state_folders.py.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import (
    ErrorCategory,
    ExecutionConfig,
    Level1Config,
    Level2Config,
    RecoveryStrategy,
    Secret,
    StateConfig,
    TokenConfig,
    get_execution_config,
    reset_execution_config,
)
from maestro_hive.engine.settings import FrozenConfigError
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLES = [
    "MAESTRO_STATE_DIR", "MAESTRO_CHECKPOINT_DIR", "MAESTRO_L1_MAX_ATTEMPTS",
    "MAESTRO_L2_MAX_ATTEMPTS", "MAESTRO_TOKEN_LIMIT", "JIRA_BASE_URL", "JIRA_PROJECT_KEY",
    "JIRA_EMAIL", "JIRA_API_TOKEN", "MAESTRO_JIRA_INDEX_LAG",
]  # fmt: skip
#: A password, which no text of this project shows in an address.
WORD = "s3cret"
SECRETS = ["jira_api_token"]

DEFAULTS: dict[type[Any], dict[str, object]] = {
    Level1Config: {
        "max_attempts": 3,
        "base_delay_seconds": 1.0,
        "max_delay_seconds": 5.0,
        "backoff_multiplier": 1.5,
        "enable_self_healing": True,
        "enable_syntax_validation": True,
        "recovery_strategy": RecoveryStrategy.REFLECT_AND_RETRY,
        "max_interruptions": 5,
    },
    Level2Config: {
        "max_attempts": 2,
        "base_delay_seconds": 5.0,
        "max_delay_seconds": 60.0,
        "backoff_multiplier": 2.0,
        "circuit_breaker_threshold": 5,
        "circuit_breaker_cooldown_seconds": 300,
        "enable_jira_escalation": True,
        "recovery_strategy": RecoveryStrategy.ESCALATE,
    },
    StateConfig: {
        "state_dir": "/var/maestro/state",
        "checkpoint_dir": "/var/maestro/checkpoints",
        "enable_persistence": True,
        "auto_checkpoint_interval_seconds": 60,
        "verify_checksum_on_load": True,
        "max_checkpoints_per_workflow": 10,
        "store_streams": True,
    },
    TokenConfig: {
        "max_tokens_per_persona": 100_000,
        "max_tokens_per_execution": 500_000,
        "track_usage": True,
        "enforce_budget": True,
    },
    ExecutionConfig: {
        "level1": Level1Config(),
        "level2": Level2Config(),
        "state": StateConfig(),
        "tokens": TokenConfig(),
        "timeout_seconds": 300.0,
        "capture_metrics": True,
        "log_level": "INFO",
        "jira_project_key": "MD",
        "jira_base_url": "",
        "jira_email": None,
        "jira_api_token": None,
        "jira_index_lag_seconds": 120.0,
    },
}
EVERY_SETTING = [(kind, name) for kind, values in DEFAULTS.items() for name in values]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    reset_execution_config()
    yield
    reset_execution_config()


def refused(kind: type[Any], name: str, value: object) -> str:
    """Return what is said when a setting is refused, as an argument and as an attribute alike."""
    with pytest.raises(ConfigurationError) as as_argument:
        kind(**{name: value})
    settings = kind()
    before = getattr(settings, name)
    with pytest.raises(ConfigurationError) as as_attribute:
        setattr(settings, name, value)
    assert getattr(settings, name) is before
    assert str(as_argument.value) == str(as_attribute.value)
    return str(as_argument.value)


# --- names, defaults, values -----------------------------------------------------------------


@for_each("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_the_settings_and_their_order_are_the_documented_ones(kind: type[Any]) -> None:
    assert [field.name for field in dataclasses.fields(kind)] == list(DEFAULTS[kind])


@for_each("kind, name", EVERY_SETTING)
def test_every_default_is_the_documented_one(kind: type[Any], name: str) -> None:
    value = getattr(kind(), name)
    assert value == DEFAULTS[kind][name]


@for_each("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_the_settings_may_be_given_by_position(kind: type[Any]) -> None:
    assert kind(*DEFAULTS[kind].values()) == kind()


def test_the_recovery_strategies_are_the_documented_ones() -> None:
    assert {each.name: each.value for each in RecoveryStrategy} == {
        "RETRY_SAME": "retry_same",
        "RETRY_WITH_BACKOFF": "retry_with_backoff",
        "REFLECT_AND_RETRY": "reflect_and_retry",
        "ESCALATE": "escalate",
        "SKIP": "skip",
    }


def test_the_error_categories_are_the_documented_ones_and_two_of_our_own() -> None:
    assert all(each.name == each.value for each in ErrorCategory)
    assert {each.value for each in ErrorCategory} == {
        "SYNTAX", "TEST_FAILURE", "ACC_VIOLATION", "BDV_VIOLATION", "TIMEOUT", "API_ERROR",
        "RESOURCE_ERROR", "UNKNOWN", "RATE_LIMIT", "TOKEN_BUDGET",
    }  # fmt: skip


def test_no_two_configurations_share_a_part() -> None:
    one, other = ExecutionConfig(), ExecutionConfig()
    one.level1.max_attempts = 9
    assert other.level1.max_attempts == 3
    assert ExecutionConfig().level1.max_attempts == 3


def test_parts_and_settings_may_be_set_after_construction() -> None:
    config = ExecutionConfig()
    config.state = StateConfig(state_dir="/elsewhere")
    config.level2 = Level2Config(max_attempts=7)
    config.tokens.enforce_budget = False
    config.timeout_seconds = 1
    assert config.state.state_dir == "/elsewhere"
    assert config.level2.max_attempts == 7
    assert not config.tokens.enforce_budget
    assert config.timeout_seconds == 1


# --- what a setting may be -------------------------------------------------------------------

ACCEPTED = [
    (Level1Config, "max_attempts", 1, 1),
    (Level1Config, "base_delay_seconds", 0, 0),
    (Level1Config, "base_delay_seconds", 0.001, 0.001),
    (Level1Config, "backoff_multiplier", 1, 1),
    (Level1Config, "recovery_strategy", "skip", RecoveryStrategy.SKIP),
    (Level1Config, "recovery_strategy", RecoveryStrategy.SKIP, RecoveryStrategy.SKIP),
    (Level1Config, "max_interruptions", 0, 0),
    (Level2Config, "circuit_breaker_cooldown_seconds", 0.05, 0.05),
    (StateConfig, "auto_checkpoint_interval_seconds", 0, 0),
    (StateConfig, "state_dir", "relative/path", "relative/path"),
    (StateConfig, "state_dir", Path("/a/b"), "/a/b"),
    (TokenConfig, "max_tokens_per_persona", 0, 0),
    (TokenConfig, "max_tokens_per_execution", 10**18, 10**18),
    (ExecutionConfig, "timeout_seconds", 0.001, 0.001),
    (ExecutionConfig, "log_level", "debug", "DEBUG"),
    (ExecutionConfig, "log_level", "Warning", "WARNING"),
    (ExecutionConfig, "jira_project_key", "ABC_9", "ABC_9"),
    (ExecutionConfig, "jira_base_url", "", ""),
    (ExecutionConfig, "jira_base_url", "https://jira.example.com/", "https://jira.example.com"),
    (ExecutionConfig, "jira_base_url", "http://127.0.0.1:8080/jira", "http://127.0.0.1:8080/jira"),
    (ExecutionConfig, "jira_base_url", "http://[::1]:80", "http://[::1]:80"),
    (ExecutionConfig, "jira_email", "me@example.com", "me@example.com"),
    (ExecutionConfig, "jira_api_token", "s3cret", Secret("s3cret")),
    (ExecutionConfig, "jira_api_token", Secret("s3cret"), Secret("s3cret")),
    (ExecutionConfig, "jira_index_lag_seconds", 0, 0),
]


@for_each("kind, name, given, expected", ACCEPTED)
def test_a_good_value_is_stored(
    kind: type[Any], name: str, given: object, expected: object
) -> None:
    settings = kind()
    setattr(settings, name, given)
    for value in (getattr(kind(**{name: given}), name), getattr(settings, name)):
        assert value == expected
        assert isinstance(value, type(expected) if type(expected) is not int else int | float)


WHOLE = [0, -1, 1.0, 2.5, "3", None, True, math.nan, [1], 1 + 0j]
COUNT = [-1, 1.0, "3", None, True]
SECONDS = [-1, -0.001, math.nan, math.inf, -math.inf, 10**400, "1", None, True, 1j]
FACTOR = [0, 0.999, -2, math.nan, math.inf, "2", None, True]
FLAG = [0, 1, "true", "", None]
FOLDER = ["", "  ", "a\0b", None, 7, b"/bytes", ["/a"], "~nobody-of-this-name/x"]
STRATEGY = ["", "retry", "ESCALATE", None, 1, ErrorCategory.TIMEOUT]
PART = [None, {}, {"max_attempts": 1}, "x", 3, Secret]
ADDRESS = [
    None, 1, "jira.example.com", "ftp://jira.example.com", "https://", "https:///x", "//x",
    "https://a b", "https://a/?token=x", "https://a/#x", "https://a\n", "file:///etc",
    "https://:80",
]  # fmt: skip

REFUSED: list[tuple[type[Any], str, list[Any]]] = [
    (Level1Config, "max_attempts", WHOLE),
    (Level1Config, "base_delay_seconds", SECONDS),
    (Level1Config, "max_delay_seconds", SECONDS),
    (Level1Config, "backoff_multiplier", FACTOR),
    (Level1Config, "enable_self_healing", FLAG),
    (Level1Config, "enable_syntax_validation", FLAG),
    (Level1Config, "recovery_strategy", STRATEGY),
    (Level1Config, "max_interruptions", COUNT),
    (Level2Config, "max_attempts", WHOLE),
    (Level2Config, "base_delay_seconds", SECONDS),
    (Level2Config, "max_delay_seconds", SECONDS),
    (Level2Config, "backoff_multiplier", FACTOR),
    (Level2Config, "circuit_breaker_threshold", WHOLE),
    (Level2Config, "circuit_breaker_cooldown_seconds", SECONDS),
    (Level2Config, "enable_jira_escalation", FLAG),
    (Level2Config, "recovery_strategy", STRATEGY),
    (StateConfig, "state_dir", FOLDER),
    (StateConfig, "checkpoint_dir", FOLDER),
    (StateConfig, "enable_persistence", FLAG),
    (StateConfig, "auto_checkpoint_interval_seconds", SECONDS),
    (StateConfig, "verify_checksum_on_load", FLAG),
    (StateConfig, "max_checkpoints_per_workflow", WHOLE),
    (StateConfig, "store_streams", FLAG),
    (TokenConfig, "max_tokens_per_persona", COUNT),
    (TokenConfig, "max_tokens_per_execution", COUNT),
    (TokenConfig, "track_usage", FLAG),
    (TokenConfig, "enforce_budget", FLAG),
    (ExecutionConfig, "level1", [*PART, Level2Config()]),
    (ExecutionConfig, "level2", [*PART, Level1Config()]),
    (ExecutionConfig, "state", PART),
    (ExecutionConfig, "tokens", PART),
    (ExecutionConfig, "timeout_seconds", [0, *SECONDS]),
    (ExecutionConfig, "capture_metrics", FLAG),
    (ExecutionConfig, "log_level", ["", "LOUD", None, 20, b"INFO"]),
    (ExecutionConfig, "jira_project_key", ["", "a b", "1A", "A-1", None, 1, "A\n", "../x"]),
    (ExecutionConfig, "jira_base_url", ADDRESS),
    (ExecutionConfig, "jira_email", ["", "me", "a b@c", "a@b@c", 1]),
    (ExecutionConfig, "jira_index_lag_seconds", SECONDS),
]


def test_every_setting_has_values_that_are_refused() -> None:
    tested = {(kind, name) for kind, name, _ in REFUSED}
    assert tested == set(EVERY_SETTING) - {(ExecutionConfig, name) for name in SECRETS}


@for_each("kind, name, values", REFUSED)
def test_a_bad_value_is_refused_with_its_name_and_what_it_must_be(
    kind: type[Any], name: str, values: list[object]
) -> None:
    for value in values:
        message = refused(kind, name, value)
        assert message.startswith(f"{kind.__name__}.{name} is {repr(value)[:70]}")
        assert ", and must be " in message
        assert len(message) < 300


@for_each("name", SECRETS)
@for_each("value", ["", "  \n", 7, b"s3cret", ["s3cret"], {"token": "s3cret"}])
def test_a_bad_token_is_refused_and_not_repeated(name: str, value: object) -> None:
    message = refused(ExecutionConfig, name, value)
    assert message.startswith(f"ExecutionConfig.{name} is ")
    assert "s3cret" not in message


@pytest.mark.parametrize(
    "address", [f"https://me:{WORD}@jira.example.com", f"{WORD}@x", f"//a:{WORD}@"]
)
def test_an_address_with_a_password_is_refused_and_not_repeated(address: str) -> None:
    message = refused(ExecutionConfig, "jira_base_url", address)
    assert "s3cret" not in message
    assert "JIRA_API_TOKEN" in message


def test_a_level_that_a_program_added_to_logging_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "getLevelNamesMapping", lambda: {"TRACE": 5})
    assert ExecutionConfig(log_level="trace").log_level == "TRACE"


@for_each("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_a_misspelt_setting_is_refused(kind: type[Any]) -> None:
    settings = kind()
    with pytest.raises(ConfigurationError, match=f"{kind.__name__}.max_atempts is not a setting"):
        settings.max_atempts = 3
    with pytest.raises(TypeError, match="max_atempts"):
        kind(max_atempts=3)


def test_a_setting_cannot_be_deleted() -> None:
    config = ExecutionConfig()
    with pytest.raises(ConfigurationError, match=r"ExecutionConfig\.state .* cannot be deleted"):
        del config.state
    assert config.state == StateConfig()


def test_a_refusal_is_one_of_our_errors_and_a_value_error() -> None:
    with pytest.raises(MaestroError):
        Level1Config(max_attempts=0)
    with pytest.raises(ValueError, match="max_attempts"):
        Level1Config(max_attempts=0)


# --- the environment -------------------------------------------------------------------------

FROM_ENVIRONMENT: list[tuple[str, str, type[Any], str, object]] = [
    ("MAESTRO_STATE_DIR", "/srv/state", StateConfig, "state_dir", "/srv/state"),
    ("MAESTRO_CHECKPOINT_DIR", "/srv/cp", StateConfig, "checkpoint_dir", "/srv/cp"),
    ("MAESTRO_L1_MAX_ATTEMPTS", "7", Level1Config, "max_attempts", 7),
    ("MAESTRO_L2_MAX_ATTEMPTS", " 4 ", Level2Config, "max_attempts", 4),
    ("MAESTRO_TOKEN_LIMIT", "250_000", TokenConfig, "max_tokens_per_persona", 250_000),
    ("JIRA_BASE_URL", "https://j.example/", ExecutionConfig, "jira_base_url", "https://j.example"),
    ("JIRA_PROJECT_KEY", "OPS", ExecutionConfig, "jira_project_key", "OPS"),
    ("JIRA_EMAIL", "me@example.com", ExecutionConfig, "jira_email", "me@example.com"),
    ("JIRA_API_TOKEN", "s3cret\n", ExecutionConfig, "jira_api_token", Secret("s3cret")),
    ("MAESTRO_JIRA_INDEX_LAG", "2.5", ExecutionConfig, "jira_index_lag_seconds", 2.5),
]  # fmt: skip


def test_every_variable_is_tested() -> None:
    assert [row[0] for row in FROM_ENVIRONMENT] == VARIABLES


@pytest.mark.parametrize("variable, text, kind, name, value", FROM_ENVIRONMENT)
def test_a_variable_gives_its_setting_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    text: str,
    kind: type[Any],
    name: str,
    value: object,
) -> None:
    monkeypatch.setenv(variable, text)
    settings = kind()
    assert getattr(settings, name) == value
    for other in DEFAULTS[kind].keys() - {name}:
        assert getattr(settings, other) == DEFAULTS[kind][other]


@pytest.mark.parametrize("variable, text, kind, name, value", FROM_ENVIRONMENT)
def test_a_variable_is_read_when_a_configuration_is_made(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    text: str,
    kind: type[Any],
    name: str,
    value: object,
) -> None:
    before = kind()
    monkeypatch.setenv(variable, text)
    made = kind()
    monkeypatch.delenv(variable)
    assert getattr(before, name) == getattr(kind(), name) == DEFAULTS[kind][name]
    assert getattr(made, name) == value


@pytest.mark.parametrize("variable, text, kind, name, value", FROM_ENVIRONMENT)
def test_an_empty_variable_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    text: str,
    kind: type[Any],
    name: str,
    value: object,
) -> None:
    for empty in ("", "  ", "\n"):
        monkeypatch.setenv(variable, empty)
        assert getattr(kind(), name) == DEFAULTS[kind][name], ascii(empty)


def test_the_environment_reaches_the_parts_of_a_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, text, *_ in FROM_ENVIRONMENT:
        monkeypatch.setenv(variable, text)
    config = ExecutionConfig()
    assert config.level1.max_attempts == 7
    assert config.level2.max_attempts == 4
    assert config.state.state_dir == "/srv/state"
    assert config.tokens.max_tokens_per_persona == 250_000
    assert config.tokens.max_tokens_per_execution == 500_000
    assert config.jira_api_token is not None
    assert config.jira_api_token.reveal() == "s3cret"


BAD_VARIABLES = [
    ("MAESTRO_L1_MAX_ATTEMPTS", "three", Level1Config),
    ("MAESTRO_L1_MAX_ATTEMPTS", "3.0", Level1Config),
    ("MAESTRO_L1_MAX_ATTEMPTS", "0", Level1Config),
    ("MAESTRO_L1_MAX_ATTEMPTS", "9" * 5000, Level1Config),
    ("MAESTRO_L2_MAX_ATTEMPTS", "-1", Level2Config),
    ("MAESTRO_L2_MAX_ATTEMPTS", "0x2", Level2Config),
    ("MAESTRO_TOKEN_LIMIT", "lots", TokenConfig),
    ("MAESTRO_TOKEN_LIMIT", "-5", TokenConfig),
    ("MAESTRO_TOKEN_LIMIT", "1e6", TokenConfig),
    ("MAESTRO_STATE_DIR", "~nobody-of-this-name/x", StateConfig),
    ("MAESTRO_CHECKPOINT_DIR", "~nobody-of-this-name/x", StateConfig),
    ("JIRA_BASE_URL", "jira.example.com", ExecutionConfig),
    ("JIRA_PROJECT_KEY", "not a key", ExecutionConfig),
    ("JIRA_EMAIL", "me", ExecutionConfig),
    ("MAESTRO_JIRA_INDEX_LAG", "soon", ExecutionConfig),
    ("MAESTRO_JIRA_INDEX_LAG", "-1", ExecutionConfig),
    ("MAESTRO_JIRA_INDEX_LAG", "nan", ExecutionConfig),
]


@pytest.mark.parametrize("variable, text, kind", BAD_VARIABLES)
def test_a_bad_variable_is_named_with_its_value_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, kind: type[Any]
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError) as caught:
        kind()
    message = str(caught.value)
    assert message.startswith(f"the environment variable {variable} is ")
    assert text[:50] in message
    assert ", and must be " in message
    assert message.endswith("; unset it to use the default")
    assert len(message) < 300
    with pytest.raises(ConfigurationError, match=variable):
        ExecutionConfig()


def test_a_bad_variable_names_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JIRA_BASE_URL", f"https://me:{WORD}@jira.example.com")
    with pytest.raises(ConfigurationError, match="JIRA_BASE_URL") as caught:
        ExecutionConfig()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "variable, kind, given",
    [
        ("MAESTRO_L1_MAX_ATTEMPTS", Level1Config, {"max_attempts": 5}),
        ("MAESTRO_L2_MAX_ATTEMPTS", Level2Config, {"max_attempts": 5}),
        ("MAESTRO_TOKEN_LIMIT", TokenConfig, {"max_tokens_per_persona": 5}),
        ("MAESTRO_STATE_DIR", StateConfig, {"state_dir": "/given"}),
    ],
)
@pytest.mark.parametrize("text", ["9", "~nobody-of-this-name"])
def test_an_argument_wins_over_the_environment_even_over_a_bad_one(
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    kind: type[Any],
    given: dict[str, Any],
    text: str,
) -> None:
    monkeypatch.setenv(variable, text)
    settings = kind(**given)
    assert {name: getattr(settings, name) for name in given} == given


# --- frozen copies ---------------------------------------------------------------------------


def test_a_frozen_copy_is_equal_and_stays_when_the_original_changes() -> None:
    config = ExecutionConfig(level1=Level1Config(max_attempts=4), jira_api_token=Secret("s3cret"))
    frozen = config.frozen()
    assert frozen == config
    assert isinstance(frozen, ExecutionConfig)
    config.level1.max_attempts = 9
    config.state = StateConfig(state_dir="/elsewhere")
    config.timeout_seconds = 1
    assert frozen.level1.max_attempts == 4
    assert frozen.state == StateConfig()
    assert frozen.timeout_seconds == 300.0


@for_each("kind, name", EVERY_SETTING)
def test_no_setting_of_a_frozen_copy_can_be_changed(kind: type[Any], name: str) -> None:
    frozen = kind().frozen()
    for error in (FrozenConfigError, ConfigurationError, dataclasses.FrozenInstanceError):
        with pytest.raises(error, match=f"{kind.__name__}.{name} belongs to the frozen copy"):
            setattr(frozen, name, DEFAULTS[kind][name])
    with pytest.raises(ConfigurationError, match="cannot be deleted"):
        delattr(frozen, name)
    assert frozen == kind()


@for_each("part", ["level1", "level2", "state", "tokens"])
def test_the_parts_of_a_frozen_copy_are_frozen_and_those_of_the_original_are_not(part: str) -> None:
    config = ExecutionConfig()
    frozen = config.frozen()
    name = dataclasses.fields(getattr(config, part))[0].name
    value = getattr(getattr(config, part), name)
    with pytest.raises(FrozenConfigError):
        setattr(getattr(frozen, part), name, value)
    setattr(getattr(config, part), name, value)


def test_freezing_again_gives_the_same_copy() -> None:
    frozen = ExecutionConfig().frozen()
    assert frozen.frozen() is frozen


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copied_or_pickled_configuration_is_equal_and_stays_frozen(how: Any) -> None:
    config = ExecutionConfig(timeout_seconds=5, jira_api_token=Secret("s3cret"))
    assert how(config) == config
    how(config).timeout_seconds = 6
    with pytest.raises(FrozenConfigError):
        how(config.frozen()).timeout_seconds = 6
    with pytest.raises(FrozenConfigError):
        how(config.frozen()).state.state_dir = "/elsewhere"


def test_a_changed_version_of_a_frozen_copy_can_be_made() -> None:
    frozen = ExecutionConfig().frozen()
    changed = dataclasses.replace(
        frozen, level1=dataclasses.replace(frozen.level1, max_attempts=9), timeout_seconds=1
    )
    assert (changed.level1.max_attempts, changed.timeout_seconds) == (9, 1)
    assert frozen.level1.max_attempts == 3


def test_the_error_about_a_frozen_copy_survives_pickling() -> None:
    with pytest.raises(FrozenConfigError) as caught:
        ExecutionConfig().frozen().timeout_seconds = 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- what is shown ---------------------------------------------------------------------------


def test_the_settings_as_a_dictionary_are_plain_json() -> None:
    config = ExecutionConfig(level1=Level1Config(max_attempts=4), log_level="DEBUG")
    shown = json.loads(json.dumps(config.to_dict()))
    assert shown == config.to_dict()
    assert list(shown) == list(DEFAULTS[ExecutionConfig])
    assert shown["level1"]["max_attempts"] == 4
    assert shown["level1"]["recovery_strategy"] == "reflect_and_retry"
    assert shown["state"]["state_dir"] == "/var/maestro/state"
    assert shown["log_level"] == "DEBUG"
    assert shown["jira_api_token"] is None


def test_the_dictionary_holds_nothing_but_plain_types() -> None:
    def check(value: object) -> None:
        assert type(value) in {dict, list, str, int, float, bool, type(None)}
        for part in value if isinstance(value, list) else ():
            check(part)
        if isinstance(value, dict):
            for key, part in value.items():
                check(key)
                check(part)

    check(ExecutionConfig(jira_api_token=Secret("s3cret")).to_dict())


@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
def test_the_token_is_never_shown(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    monkeypatch.setenv("JIRA_API_TOKEN", "s3cret")
    config = ExecutionConfig()
    config = config.frozen() if frozen else config
    token = config.jira_api_token
    shown = [
        repr(config), str(config), f"{config}", repr(config.to_dict()), repr(vars(config)),
        repr(dataclasses.asdict(config)), repr(dataclasses.astuple(config)),
        json.dumps(config.to_dict()),
        repr(token), str(token), f"{token}", f"{token!s:>20}",
    ]  # fmt: skip
    assert [text for text in shown if "s3cret" in text] == []
    assert config.to_dict()["jira_api_token"] == "***"
    assert token is not None
    assert token.reveal() == "s3cret"


@for_each("name", SECRETS)
def test_no_secret_of_a_configuration_is_shown(name: str) -> None:
    given: dict[str, Any] = {name: "s3cret"}
    config = ExecutionConfig(**given)
    shown = [repr(config), json.dumps(config.to_dict()), repr(config.frozen())]
    assert [text for text in shown if "s3cret" in text] == []
    assert config.to_dict()[name] == "***"
    assert getattr(config.frozen(), name).reveal() == "s3cret"


def test_a_secret_is_not_json_by_accident() -> None:
    with pytest.raises(TypeError):
        json.dumps(Secret("s3cret"))


def test_secrets_are_equal_when_their_texts_are() -> None:
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("b")}) == 2


# --- the shared instance ---------------------------------------------------------------------


def test_there_is_one_shared_configuration_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = get_execution_config()
    assert get_execution_config() is shared
    monkeypatch.setenv("MAESTRO_L1_MAX_ATTEMPTS", "8")
    assert get_execution_config().level1.max_attempts == 3
    reset_execution_config()
    assert get_execution_config() is not shared
    assert get_execution_config().level1.max_attempts == 8


def test_the_shared_configuration_may_be_changed() -> None:
    get_execution_config().level1.max_attempts = 6
    assert get_execution_config().level1.max_attempts == 6
    assert ExecutionConfig().level1.max_attempts == 3


def test_a_bad_environment_leaves_no_half_made_shared_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAESTRO_TOKEN_LIMIT", "many")
    with pytest.raises(ConfigurationError, match="MAESTRO_TOKEN_LIMIT"):
        get_execution_config()
    monkeypatch.setenv("MAESTRO_TOKEN_LIMIT", "5")
    assert get_execution_config().tokens.max_tokens_per_persona == 5


def test_threads_that_ask_at_once_get_the_same_configuration() -> None:
    start = threading.Barrier(16)
    got: list[ExecutionConfig] = []

    def ask() -> None:
        start.wait()
        got.append(get_execution_config())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(config) for config in got}) == 1
