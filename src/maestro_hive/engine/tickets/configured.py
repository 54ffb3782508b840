"""Which ticket system a configuration names, and what it lacks.

The systems themselves are imported where one is named: most configurations name none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.settings import Secret
    from maestro_hive.engine.tickets import TicketSystem


def ticket_system(config: ExecutionConfig) -> TicketSystem | None:
    """Return the ticket system that a configuration names; None if it names none.

    Raises ConfigurationError if it names several, or one without all that this one needs.
    """
    made = {setting: make for setting, make in _SYSTEMS.items() if _given(config, setting)}
    if len(made) > 1:
        raise ConfigurationError(
            f"escalations can go to one system only, and {' and '.join(made)} name several;"
            " unset all but one"
        )
    return next(iter(made.values()))(config) if made else None


def _jira(config: ExecutionConfig) -> TicketSystem:
    from maestro_hive.engine.tickets import jira
    from maestro_hive.engine.tickets.http import Server

    address = _required(config, "jira_base_url", "JIRA_BASE_URL", "jira_base_url")
    token = _required(config, "jira_api_token", "JIRA_API_TOKEN", "jira_base_url")
    email = config.jira_email
    version = config.jira_api_version or (3 if email else 2)
    if version == 3:
        email = _required(config, "jira_email", "JIRA_EMAIL", "jira_base_url")
    server = Server(
        name="Jira",
        setting="jira_base_url",
        address=address,
        headers=lambda _: jira.credentials(email, token),
        timeout=config.ticket_timeout_seconds,
        secrets=(token,),
    )
    return jira.JiraTickets(
        server,
        version=version,
        project_key=config.jira_project_key,
        issue_type=config.jira_issue_type,
        priority=config.jira_priority,
        index_lag=config.jira_index_lag_seconds,
        answerers=config.ticket_answerers,
    )


def _github(config: ExecutionConfig) -> TicketSystem:
    from maestro_hive.engine.tickets import github
    from maestro_hive.engine.tickets.http import Server

    repository = _required(
        config, "github_repository", "MAESTRO_GITHUB_REPOSITORY", "github_repository"
    )
    token = _required(config, "github_token", "MAESTRO_GITHUB_TOKEN", "github_repository")
    server = Server(
        name="GitHub",
        setting="github_base_url",
        address=_required(
            config, "github_base_url", "MAESTRO_GITHUB_BASE_URL", "github_repository"
        ),
        headers=lambda _: github.credentials(token),
        timeout=config.ticket_timeout_seconds,
        secrets=(token,),
    )
    return github.GitHubTickets(server, repository=repository, answerers=config.ticket_answerers)


def _webhook(config: ExecutionConfig) -> TicketSystem:
    from maestro_hive.engine.tickets import webhook
    from maestro_hive.engine.tickets.http import Server

    address: Secret = _required(config, "webhook_url", "MAESTRO_WEBHOOK_URL", "webhook_url")
    secret = _required(config, "webhook_secret", "MAESTRO_WEBHOOK_SECRET", "webhook_url")
    server = Server(
        name="the webhook",
        setting="webhook_url",
        address=address.reveal(),
        headers=lambda body: webhook.signature(secret, body),
        timeout=config.ticket_timeout_seconds,
        secrets=(address, secret),
    )
    return webhook.WebhookTickets(server)


def _slack(config: ExecutionConfig) -> TicketSystem:
    from maestro_hive.engine.tickets import webhook
    from maestro_hive.engine.tickets.http import Server

    address: Secret = _required(
        config, "slack_webhook_url", "MAESTRO_SLACK_WEBHOOK_URL", "slack_webhook_url"
    )
    server = Server(
        name="Slack",
        setting="slack_webhook_url",
        address=address.reveal(),
        headers=lambda _: {},
        timeout=config.ticket_timeout_seconds,
        secrets=(address,),
    )
    return webhook.SlackTickets(server)


def _command(config: ExecutionConfig) -> TicketSystem:
    from maestro_hive.engine.tickets.command import CommandTickets

    return CommandTickets(config.escalation_command, config.escalation_command_timeout_seconds)


#: By the setting that names a system: what makes it, and the settings that mean nothing without it.
_SYSTEMS: dict[str, Callable[[ExecutionConfig], TicketSystem]] = {
    "jira_base_url": _jira,
    "github_repository": _github,
    "webhook_url": _webhook,
    "slack_webhook_url": _slack,
    "escalation_command": _command,
}
_BELONGING: dict[str, tuple[str, ...]] = {
    "jira_base_url": ("jira_email", "jira_api_token", "jira_api_version"),
    "github_repository": ("github_token",),
    "webhook_url": ("webhook_secret",),
    "slack_webhook_url": (),
    "escalation_command": (),
}


def _given(config: ExecutionConfig, system: str) -> list[str]:
    """Return the settings that are set, of those that mean something for one system only."""
    return [name for name in (system, *_BELONGING[system]) if getattr(config, name)]


def _required(config: ExecutionConfig, name: str, variable: str, system: str) -> Any:
    """Return a setting that a system cannot do without."""
    if value := getattr(config, name):
        return value
    given = " and ".join(_given(config, system))
    raise ConfigurationError(
        f"{name} is not set, and {given} alone cannot make tickets; set {name}, in the configuration"
        f" or by the environment variable {variable}, or unset {given} to record escalations locally"
    )
