"""The commands that call agents: what is an argument, what is not, and what needs the graph's word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.agents import (
    ADAPTERS,
    Call,
    Permissions,
    Session,
    Totals,
    adapter,
    call_for,
)
from maestro_hive.team.graph import AGENTS, Persona, check_document
from maestro_hive.team.graph.documents import parse_document
from maestro_hive.team.graph.records import PERMISSIONS
from tests.tables import for_each

FIRST = Session(id="11111111-2222-4333-8444-555555555555")
SECOND = replace(FIRST, started=True)
#: Every flag of theirs that lets an agent do more than its settings say.
MORE_RIGHTS = (
    *("--dangerously-skip-permissions", "--dangerously-bypass-approvals-and-sandbox", "--auto"),
    *("--approval-mode=yolo", "--permission-mode=bypassPermissions", "--yolo"),
)
SOME_RIGHTS = (
    *("--permission-mode=acceptEdits", 'sandbox_mode="workspace-write"', "--skip-trust"),
    *("--approval-mode=auto_edit", "--approval-mode=auto-edit"),
)


def call(prompt: str = "build it", **more: Any) -> Call:
    return Call(prompt=prompt, folder="/run/call", **more)


def test_every_agent_that_a_graph_may_name_has_an_adapter() -> None:
    assert tuple(ADAPTERS) == AGENTS
    assert all(name == each.name for name, each in ADAPTERS.items())
    assert tuple(Permissions) == PERMISSIONS


def test_another_agent_is_an_error_that_names_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"'cursor' is no agent; use one of claude, codex"):
        adapter("cursor")


# --- the prompt -----------------------------------------------------------------------------------


@for_each("name", AGENTS)
@for_each("session", [None, FIRST, SECOND])
def test_no_text_of_a_prompt_is_an_argument(name: str, session: Session | None) -> None:
    given = call("--yolo zebra", session=session, feedback="--auto zebra")
    command = adapter(name).command(given)
    assert not any("zebra" in each for each in command.argv)
    assert "--yolo zebra" in command.stdin
    assert "--auto zebra" in command.stdin


@for_each("name", AGENTS)
@for_each("prompt", ["/run rm x", "!rm x", "\n /clear", "@secret", "#note", "-x"])
def test_a_prompt_is_never_a_command_to_the_agent_itself(name: str, prompt: str) -> None:
    for session in (None, FIRST, SECOND):
        said = adapter(name).command(call(prompt, session=session)).stdin
        assert said.lstrip()[0] not in "/!@#-"
        assert prompt in said


@for_each("name", AGENTS)
def test_a_model_that_looks_like_a_flag_is_still_a_model(name: str) -> None:
    argv = adapter(name).command(call(model="--yolo")).argv
    assert "--model=--yolo" in argv
    assert "--yolo" not in argv


def test_a_prompt_has_no_zero_bytes() -> None:
    assert adapter("claude").command(call("a\0b")).stdin == "ab"


@for_each("name", AGENTS)
def test_short_feedback_is_told_and_long_feedback_is_a_file(name: str) -> None:
    short = adapter(name).command(call(feedback="assert 1 == 2"))
    assert "assert 1 == 2" in short.stdin
    assert "/run/call/feedback.txt" not in short.files
    long = "first\n" + "x" * 9_000 + "\nlast line"
    told = adapter(name).command(call(feedback=long))
    assert told.files["/run/call/feedback.txt"] == long
    assert "/run/call/feedback.txt" in told.stdin
    assert "last line" in told.stdin
    assert len(told.stdin) < 3_000


@for_each(
    "name, opened",
    [
        ("claude", "--add-dir=/run/call"),
        ("gemini", "--include-directories=/run/call"),
        ("qwen", "--include-directories=/run/call"),
        ("opencode", "--file=/run/call/feedback.txt"),
        ("aider", "--read=/run/call/feedback.txt"),
    ],
)
def test_an_agent_may_read_the_file_with_its_feedback(name: str, opened: str) -> None:
    assert opened in adapter(name).command(call(feedback="x" * 9_000)).argv
    assert opened not in adapter(name).command(call(feedback="x")).argv


def test_who_was_interrupted_is_told_so_and_who_failed_is_told_why() -> None:
    resumed = adapter("claude").command(call(session=SECOND)).stdin
    assert resumed.startswith("You were interrupted.")
    assert resumed.endswith("build it")
    again = adapter("claude").command(call(session=SECOND, feedback="1 test failed")).stdin
    assert again.startswith("The task is not done yet.")
    assert "1 test failed" in again
    assert "build it" in again


def test_the_folder_for_long_texts_is_an_absolute_path() -> None:
    with pytest.raises(ConfigurationError, match=r"'call' is no absolute path"):
        adapter("claude").command(Call(prompt="x", folder="call"))


# --- permissions ----------------------------------------------------------------------------------


@for_each("name", AGENTS)
@for_each("session", [None, FIRST, SECOND])
def test_only_the_graph_gives_an_agent_more_rights(name: str, session: Session | None) -> None:
    def flags(permissions: Permissions) -> set[str]:
        given = call(session=session, permissions=permissions)
        return set(adapter(name).command(given).argv)

    assert not flags(Permissions.OWN) & {*MORE_RIGHTS, *SOME_RIGHTS}
    assert not flags(Permissions.EDIT) & set(MORE_RIGHTS)
    assert (name == "aider") is not bool(flags(Permissions.ALL) & set(MORE_RIGHTS))


def test_aider_runs_no_commands_whatever_it_is_permitted() -> None:
    # Without --yes-always it takes the end of its input for a yes, also to a command.
    for permissions in Permissions:
        argv = adapter("aider").command(call(permissions=permissions)).argv
        assert {"--yes-always", "--no-suggest-shell-commands"} <= set(argv)


def test_a_persona_of_a_graph_gives_model_arguments_and_permissions() -> None:
    persona = Persona(name="dev", agent="codex", model="gpt-5", args=("--oss",), permissions="edit")
    given = call_for(persona, prompt="build", folder="/run/call", feedback="x")
    assert given == Call(
        prompt="build",
        folder="/run/call",
        model="gpt-5",
        args=("--oss",),
        permissions=Permissions.EDIT,
        feedback="x",
    )
    assert call_for(Persona(name="dev", agent="codex"), prompt="", folder="/").permissions == "own"


def test_permissions_that_do_not_exist_are_an_error_of_the_graph() -> None:
    tree = {
        "feature": "f",
        "tasks": [{"id": "T", "title": "t", "persona": {"agent": "claude", "permissions": "yolo"}}],
    }
    (error,) = check_document(parse_document(json.dumps(tree).encode(), "json")).errors
    assert error.path == "$.tasks[0].persona.permissions"
    assert error.message == "'yolo' is not one of own, edit, all"


@for_each("name", AGENTS)
def test_arguments_of_the_graph_cannot_change_how_the_output_is_read(name: str) -> None:
    argv = adapter(name).command(call(args=("--first", "--second"))).argv
    at = argv.index("--first")
    assert argv[at + 1] == "--second"
    needed = {
        "claude": "--output-format=stream-json",
        "codex": "--json",
        "gemini": "--output-format=stream-json",
        "opencode": "--format=json",
        "qwen": "--output-format=stream-json",
        "aider": "--analytics-log=/dev/stdout",
    }
    assert argv.index(needed[name]) > at


# --- sessions -------------------------------------------------------------------------------------


@for_each(
    "name, first, then",
    [
        ("claude", f"--session-id={FIRST.id}", f"--resume={FIRST.id}"),
        ("gemini", f"--session-id={FIRST.id}", f"--resume={FIRST.id}"),
        ("qwen", f"--session-id={FIRST.id}", f"--resume={FIRST.id}"),
        ("aider", f"--chat-history-file=/run/call/{FIRST.id}.chat.md", "--restore-chat-history"),
    ],
)
def test_a_session_is_set_once_and_then_resumed(name: str, first: str, then: str) -> None:
    started = adapter(name).command(call(session=FIRST))
    assert first in started.argv
    assert then not in started.argv
    assert started.session == SECOND, "this is recorded before the start"
    resumed = adapter(name).command(call(session=started.session))
    assert then in resumed.argv


def test_codex_and_opencode_resume_the_session_that_they_have_named() -> None:
    assert adapter("codex").command(call()).argv[:2] == ("codex", "exec")
    resumed = adapter("codex").command(call(session=SECOND)).argv
    assert resumed[:3] == ("codex", "exec", "resume")
    assert resumed[-3:] == ("--", SECOND.id, "-")
    assert f"--session={SECOND.id}" in adapter("opencode").command(call(session=SECOND)).argv
    for name in ("codex", "opencode"):
        assert adapter(name).new_session("run/T/1") is None


def test_the_same_seed_gives_the_same_new_session() -> None:
    claude = adapter("claude")
    assert claude.new_session("run/T/1") == claude.new_session("run/T/1")
    assert claude.new_session("run/T/1") != claude.new_session("run/T/2")


@for_each("bad", ["", "--yolo", "a b", "../x", "a/b", "x" * 129, "ä"])
def test_an_id_that_could_be_something_else_is_no_session(bad: str) -> None:
    with pytest.raises(ConfigurationError, match="is no id of a session"):
        Session(id=bad)


def test_a_recorded_session_comes_back() -> None:
    session = Session(id="ses_1", started=True, counted=Totals(1, 2, 3, 4, 5))
    assert Session.from_json(json.loads(json.dumps(session.to_json()))) == session


def test_a_session_that_was_told_absurd_numbers_comes_back_as_well() -> None:
    absurd = Totals(10**15, 10**15, 10**15, 10**15, 10**15)
    session = Session(id="ses_1", counted=absurd.plus(absurd))
    assert Session.from_json(session.to_json()) == session


@for_each(
    "bad",
    [
        *(None, [], {}, {"id": "x"}, {"id": 1, "counted": [0] * 5}),
        *({"id": "x", "counted": [0] * 4}, {"id": "x", "counted": [-1, 0, 0, 0, 0]}),
        *({"id": "x", "counted": [True] * 5}, {"id": "--x", "counted": [0] * 5}),
    ],
)
def test_what_is_no_recorded_session_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError):
        Session.from_json(bad)


# --- budgets, schemas -----------------------------------------------------------------------------


def test_an_agent_with_a_limit_of_money_gets_it_in_digits() -> None:
    argv = adapter("claude").command(call(budget_usd=0.00005)).argv
    assert "--max-budget-usd=0.00005" in argv
    assert "--max-budget-usd=2" in adapter("claude").command(call(budget_usd=2.0)).argv
    for name in set(AGENTS) - {"claude"}:
        assert adapter(name).command(call(budget_usd=2.0)) == adapter(name).command(call())


@pytest.mark.parametrize("amount", [0.0, -1.0, 0.0000001])
def test_a_budget_of_nothing_starts_nothing(amount: float) -> None:
    with pytest.raises(ConfigurationError, match="nothing is left to spend"):
        adapter("claude").command(call(budget_usd=amount))


def test_an_agent_with_structured_output_gets_the_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    written = json.dumps(schema)
    assert f"--json-schema={written}" in adapter("claude").command(call(schema=schema)).argv
    assert f"--json-schema={written}" in adapter("qwen").command(call(schema=schema)).argv
    codex = adapter("codex").command(call(schema=schema))
    assert "--output-schema=/run/call/schema.json" in codex.argv
    assert codex.files == {"/run/call/schema.json": written}
    assert [name for name in AGENTS if adapter(name).has_schema] == ["claude", "codex", "qwen"]


def test_a_schema_that_is_too_long_for_an_argument_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"more than 100,000 characters; shorten it"):
        adapter("claude").command(call(schema={"title": "x" * 100_000}))


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "printed", ["2.1.197 (Claude Code)", "2.1.326 (Claude Code)", "claude 2.1.400"]
)
def test_a_version_between_those_that_were_tried_is_no_warning(printed: str) -> None:
    assert adapter("claude").version_warning(printed) is None


@for_each("printed", ["3.0.0", "2.0.9", "1.9.9", "no number", ""])
def test_a_version_that_was_not_tried_is_a_warning(printed: str) -> None:
    warning = adapter("claude").version_warning(printed)
    assert warning is not None
    assert "tried: 2.1.197, 2.1.326" in warning


@for_each("name", AGENTS)
def test_the_page_about_agents_says_what_the_adapters_do(name: str) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/howto/agents.md").read_text("utf-8")
    known = adapter(name)
    assert f"| `{name}` | `{known.install}` | {', '.join(known.tried)} |" in page
    for permissions in Permissions:
        given = set(adapter(name).command(call(permissions=permissions)).argv)
        assert all(flag in page for flag in given & {*MORE_RIGHTS, *SOME_RIGHTS})


@for_each("name", AGENTS)
def test_the_versions_that_an_adapter_names_are_no_warnings(name: str) -> None:
    known = adapter(name)
    assert all(known.version_warning(each) is None for each in known.tried)
    assert known.version_argv == (name, "--version")
