"""Which ticket system a configuration names, and what is said when it lacks something."""

from __future__ import annotations

from typing import Any

import pytest

from maestro_hive.engine.config import ExecutionConfig
from maestro_hive.engine.settings import Secret
from maestro_hive.engine.tickets import ticket_system_from
from maestro_hive.kernel.errors import ConfigurationError
from tests.tables import for_each

JIRA = "https://jira.example.com"

NAMED: list[tuple[dict[str, Any], str, bool]] = [
    ({"jira_base_url": JIRA, "jira_email": "a@b", "jira_api_token": "t"}, "jira", True),
    ({"jira_base_url": JIRA, "jira_api_token": "t"}, "jira", True),
    ({"github_repository": "a/b", "github_token": "t"}, "github", True),
    ({"webhook_url": "https://w.example/x", "webhook_secret": "s"}, "webhook", False),
    ({"slack_webhook_url": "https://s.example/x"}, "slack", False),
    ({"escalation_command": ["notify"]}, "command", False),
]


@for_each("settings, name, finds", NAMED)
def test_a_configuration_names_a_system(settings: dict[str, Any], name: str, finds: bool) -> None:
    for config in (ExecutionConfig(**settings), ExecutionConfig(**settings).frozen()):
        made = ticket_system_from(config)
        assert made is not None
        assert (made.name, made.finds) == (name, finds)


def test_without_settings_there_is_no_system() -> None:
    assert ticket_system_from(ExecutionConfig()) is None
    assert ticket_system_from(ExecutionConfig(jira_project_key="OPS", jira_priority="")) is None


@for_each(
    "settings, version",
    [
        ({"jira_email": "a@b"}, 3),
        ({}, 2),
        ({"jira_email": "a@b", "jira_api_version": 2}, 2),
        ({"jira_email": "a@b", "jira_api_version": 3}, 3),
    ],
)
def test_an_email_address_means_jira_cloud(settings: dict[str, Any], version: int) -> None:
    config = ExecutionConfig(jira_base_url=JIRA, jira_api_token=Secret("t"), **settings)
    assert vars(ticket_system_from(config))["_version"] == version


HALF: list[tuple[dict[str, Any], str, str]] = [
    ({"jira_base_url": JIRA}, "jira_api_token", "JIRA_API_TOKEN"),
    ({"jira_base_url": JIRA, "jira_email": "a@b"}, "jira_api_token", "JIRA_API_TOKEN"),
    ({"jira_email": "a@b", "jira_api_token": "s3cret"}, "jira_base_url", "JIRA_BASE_URL"),
    ({"jira_email": "a@b"}, "jira_base_url", "JIRA_BASE_URL"),
    (
        {"jira_base_url": JIRA, "jira_api_token": "s3cret", "jira_api_version": 3},
        "jira_email",
        "JIRA_EMAIL",
    ),
    ({"github_repository": "a/b"}, "github_token", "MAESTRO_GITHUB_TOKEN"),
    ({"github_token": "s3cret"}, "github_repository", "MAESTRO_GITHUB_REPOSITORY"),
    (
        {"github_repository": "a/b", "github_token": "s3cret", "github_base_url": ""},
        "github_base_url",
        "MAESTRO_GITHUB_BASE_URL",
    ),
    ({"webhook_url": "https://w.example/s3cret"}, "webhook_secret", "MAESTRO_WEBHOOK_SECRET"),
    ({"webhook_secret": "s3cret"}, "webhook_url", "MAESTRO_WEBHOOK_URL"),
]


@for_each("settings, missing, variable", HALF)
def test_half_a_configuration_is_an_error_that_names_the_rest(
    settings: dict[str, Any], missing: str, variable: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ticket_system_from(ExecutionConfig(**settings))
    message = str(caught.value)
    assert message.startswith(f"{missing} is not set, and ")
    assert variable in message
    assert all(name in message for name in settings if name not in {missing, "github_base_url"})
    assert "s3cret" not in message


def test_two_systems_are_an_error() -> None:
    config = ExecutionConfig(jira_base_url=JIRA, github_token=Secret("t"))
    with pytest.raises(ConfigurationError, match="jira_base_url and github_repository"):
        ticket_system_from(config)


@for_each(
    "settings",
    [
        {"jira_base_url": "http://jira.example.com", "jira_api_token": "t"},
        {"github_base_url": "http://10.0.0.1", "github_repository": "a/b", "github_token": "t"},
        {"webhook_url": "http://w.example/x", "webhook_secret": "s"},
        {"slack_webhook_url": "http://127.0.0.1.example.com/x"},
    ],
)
def test_only_loopback_is_reached_without_encryption(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be encrypted; use https://"):
        ticket_system_from(ExecutionConfig(**settings))


@pytest.mark.parametrize("address", ["ftp://x", "hooks.example.com/s3cret", "https://"])
def test_an_address_of_a_webhook_that_is_none_is_not_repeated(address: str) -> None:
    with pytest.raises(ConfigurationError, match="slack_webhook_url is not an address") as caught:
        ticket_system_from(ExecutionConfig(slack_webhook_url=Secret(address)))
    assert "s3cret" not in str(caught.value)
