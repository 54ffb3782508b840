"""What a policy file may say, and what it decides."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.policy import AgentContext
from maestro_hive.engine.policy_rules import Policy, PolicyEnforcer, PolicyError, policy_schema
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path

POLICY = """
version = 1
default = "deny"

[protected]
paths = [".env", "secrets/**"]

[limits]
concurrent_personas = 3
min_budget_remaining = 100

[personas]
ann = "reviewer"

[roles.developer]
allow_tools = ["write_*", "read_*", "delete_*", "deploy"]
deny_tools = ["*_database"]
concurrent = 2
min_budget_remaining = 500

[roles.reviewer]
allow_tools = ["read_*"]

[roles."*"]
deny_tools = ["deploy"]

[[rules]]
name = "sources may be changed"
effect = "allow"
roles = ["developer"]
actions = ["read", "write"]
paths = ["src/**", "docs/*.md"]

[[rules]]
name = "migrations stay"
effect = "deny"
paths = ["src/migrations/**"]
actions = ["write"]

[[rules]]
name = "a person deploys"
effect = "ask"
tools = ["deploy"]
roles = ["developer"]
"""


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    file = tmp_path / "policy.toml"
    file.write_text(POLICY)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "link").symlink_to("../secrets")
    return Policy.from_file(file, tmp_path)


@for_each(
    "role, tool, path, action, effect, rule",
    [
        ("developer", "write_file", "src/a.py", "write", "allow", "rules[0]"),
        ("developer", "write_file", "src/A.py", "read", "allow", "rules[0]"),
        ("developer", "write_file", "docs/a.md", "write", "allow", "rules[0]"),
        ("developer", "write_file", "docs/deep/a.md", "write", "deny", "default"),
        ("developer", "write_file", ".env", "write", "deny", "protected.paths[0]"),
        ("developer", "write_file", "src/../.Env", "write", "deny", "protected.paths[0]"),
        ("developer", "write_file", "src/link/key", "write", "deny", "protected.paths[1]"),
        ("developer", "write_file", "src/migrations/1.py", "write", "deny", "rules[1]"),
        ("developer", "read_file", "src/migrations/1.py", "read", "allow", "rules[0]"),
        ("developer", "delete_file", "src/a.py", "delete", "deny", "default"),
        ("developer", "delete_tree", ".", "delete", "deny", "protected.paths[1]"),
        ("developer", "write_DATABASE", None, "write", "deny", "roles.developer.deny_tools"),
        ("developer", "think", None, "execute", "deny", "roles.developer.allow_tools"),
        ("developer", "WRITE_FILE", "src/a.py", "write", "deny", "roles.developer.allow_tools"),
        ("developer", "write_note", None, "write", "allow", "roles.developer.allow_tools"),
        ("developer", "deploy", None, "execute", "ask", "rules[2]"),
        ("reviewer", "read_file", "src/a.py", "read", "allow", "roles.reviewer.allow_tools"),
        ("reviewer", "write_file", "src/a.py", "write", "deny", "roles.reviewer.allow_tools"),
        ("somebody", "deploy", None, "execute", "deny", "roles.*.deny_tools"),
        ("somebody", "read_file", "src/a.py", "read", "deny", "default"),
    ],
)
def test_a_call_is_decided_by_the_first_of_what_forbids_asks_and_allows(
    policy: Policy, role: str, tool: str, path: str | None, action: str, effect: str, rule: str
) -> None:
    agent = AgentContext("dev", role, budget_remaining=1000)
    found = policy.decide(agent, tool, path, action)
    assert (found.effect, found.rule) == (effect, rule), found
    assert found.allowed is (effect == "allow")
    assert (found.violation_type is None) is (effect == "allow")


def test_a_minimum_of_the_budget_is_needed(policy: Policy) -> None:
    def rule(role: str, left: float) -> str:
        agent = AgentContext("dev", role, budget_remaining=left)
        return policy.decide(agent, "read_file", "src/a.py", "read").rule

    assert rule("developer", 500) == "rules[0]"
    assert rule("developer", 499) == "roles.developer.min_budget_remaining"
    assert rule("reviewer", 100) == "roles.reviewer.allow_tools"
    assert rule("reviewer", 99.5) == "limits.min_budget_remaining"


def test_roles_come_from_the_map_and_limits_from_the_roles(policy: Policy) -> None:
    assert (policy.role_of("ann"), policy.role_of("bob")) == ("reviewer", "developer_agent")
    assert (policy.concurrent_personas, policy.concurrent_in("developer")) == (3, 2)
    assert policy.concurrent_in("reviewer") is None


def test_the_default_may_be_to_allow(tmp_path: Path) -> None:
    enforcer = PolicyEnforcer(Policy({"default": "allow"}, tmp_path / "p.toml", tmp_path))
    found = enforcer.check(AgentContext("dev"), "anything", "/etc/passwd", "write")
    assert (found.allowed, found.rule) == (True, "default")
    assert found.latency_ms >= 0


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps({"default": "allow", "protected": {"paths": [".env"]}}))
    enforcer = PolicyEnforcer.from_file(file, workspace=tmp_path)
    assert not enforcer.check(AgentContext("dev"), "write_file", "a/.env", "write").allowed


def test_all_errors_are_listed_with_their_places(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "default": "maybe",
        "protected": {"paths": []},
        "limits": {"concurrent_personas": 0},
        "roles": {"developer": {"allow_tool": ["x"]}},
        "rules": [{"effect": "allow"}, {"effect": "forbid", "actions": ["wirte"]}],
        "colour": "red",
    }
    with pytest.raises(PolicyError) as caught:
        Policy(given, tmp_path / "p.toml", tmp_path)
    places = [problem.split(": ")[0] for problem in caught.value.problems]
    assert places == [
        "the file",
        "default",
        "limits.concurrent_personas",
        "protected.paths",
        "roles.developer",
        "rules[0]",
        "rules[1].actions[0]",
        "rules[1].effect",
    ]
    assert "'colour' was unexpected" in str(caught.value)
    assert str(tmp_path / "p.toml") in str(caught.value)


@pytest.mark.parametrize(
    "name, text, problem",
    [
        ("p.toml", "", "'default' is a required property"),
        ("p.toml", "default = \nx = 1", "cannot be parsed: .*line 1"),
        ("p.json", "[]", "must be an object"),
        ("p.json", '{"default": ', "cannot be parsed"),
        ("p.yaml", "default: deny", "must end with .toml or .json"),
        (
            "p.toml",
            'default = "deny"\nprotected.paths = ["[z-a]"]',
            r"protected.paths\[0\]: .* no pattern",
        ),
        ("p.toml", "x = '" + "y" * (1 << 20) + "'", "has more than"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PolicyError, match=problem):
        Policy.from_file(tmp_path / name)
    with pytest.raises(PolicyError, match="cannot be read"):
        Policy.from_file(tmp_path / "missing.toml")


def test_the_schema_that_ships_is_valid() -> None:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(policy_schema())
    assert policy_schema()["required"] == ["default"]
