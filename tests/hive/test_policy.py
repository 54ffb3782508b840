"""A policy of a hive: it forbids, allows and asks, the same in every life."""

from __future__ import annotations

import asyncio
import json
import textwrap
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import GovernanceViolation, Hive, PolicyEnforcer, RunFailedError
from maestro_hive.admin.audit import verify_audit
from maestro_hive.engine.policy import AgentContext
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.stores import close_store, open_store
from maestro_hive.testing import use
from maestro_hive.unified_execution import ExecutionConfig, PersonaExecutor, StateConfig
from tests.cli.processes import maestro
from tests.hive.conftest import quick_config
from tests.hive.test_release import HELD, released
from tests.hive.test_waits import status, until
from tests.python_processes import PythonProcess
from tests.timing import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLICY = """
default = "deny"

[protected]
paths = [".env", "secrets/**"]

[personas]
dev = "developer"

[roles.developer]
allow_tools = ["write_*", "copy", "deploy", "think"]

[[rules]]
effect = "allow"
roles = ["developer"]
paths = ["src/**"]

[[rules]]
name = "a person deploys"
effect = "ask"
tools = ["deploy"]
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "link").symlink_to("../secrets")
    (tmp_path / "policy.toml").write_text(POLICY)
    return tmp_path


def governed(workspace: Path, **given: Any) -> Hive:
    return Hive(
        workspace / "state",
        quick_config(),
        policy=workspace / "policy.toml",
        workspace=workspace,
        **given,
    )


def audit_lines(workspace: Path) -> list[dict[str, Any]]:
    text = (workspace / "state" / "audit.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def writing(hive: Hive, called: list[Any]) -> Any:
    @hive.step(persona="dev")
    async def write_file(path: str, target: str | None = None) -> str:
        called.append((path, target))
        return f"wrote {path}"

    @hive.workflow
    async def write(*calls: list[str]) -> list[str]:
        found = []
        for call in calls:
            try:
                found.append(await write_file(*call))
            except GovernanceViolation as error:
                found.append(f"{error.violation_type} {error.path}")
        return found

    return write


def test_what_is_forbidden_is_refused_and_recorded_and_the_rest_is_done(workspace: Path) -> None:
    called: list[Any] = []
    calls = [["src/a"], [".env"], ["src/a", ".env"], ["src/x/../../.ENV"], ["src/link/key"], ["x"]]
    expected = [
        "wrote src/a",
        "protected_path .env",
        "protected_path .env",
        "protected_path src/x/../../.ENV",
        "protected_path src/link/key",
        "default_deny x",
    ]
    with governed(workspace) as hive:
        assert hive.run_sync(writing(hive, called), *calls, run_id="r") == expected
        assert called == [("src/a", None)]
    lines = audit_lines(workspace)
    assert [(each["path"], each["allowed"], each["rule"]) for each in lines] == [
        ("src/a", True, "rules[0]"),
        (".env", False, "protected.paths[0]"),
        ("src/a", True, "rules[0]"),
        (".env", False, "protected.paths[0]"),
        ("src/x/../../.ENV", False, "protected.paths[0]"),
        ("src/link/key", False, "protected.paths[1]"),
        ("x", False, "default"),
    ]
    assert {(each["run_id"], each["persona_id"], each["role"]) for each in lines} == {
        ("r", "dev", "developer")
    }
    (report,) = verify_audit(workspace / "state")
    assert (report.is_intact, report.lines) == (True, 7)


def test_a_refusal_is_the_recorded_outcome_also_where_the_policy_changed(workspace: Path) -> None:
    called: list[Any] = []
    with governed(workspace) as hive:
        first = hive.run_sync(writing(hive, called), [".env"], run_id="r")
    (workspace / "policy.toml").write_text('default = "allow"')
    with governed(workspace) as hive:
        assert hive.run_sync(writing(hive, called), [".env"], run_id="r") == first
    assert called == []
    assert len(audit_lines(workspace)) == 1


def test_a_refused_step_is_never_retried(workspace: Path) -> None:
    with governed(workspace) as hive:

        @hive.step(persona="dev", max_attempts=9, rounds=3)
        async def write_file(path: str) -> None: ...

        @hive.workflow
        async def write() -> None:
            await write_file(".env")

        with pytest.raises(RunFailedError) as caught:
            hive.run_sync(write, run_id="r")
        assert isinstance(caught.value.__cause__, GovernanceViolation)
        assert len(audit_lines(workspace)) == 1


def test_arguments_that_are_not_recorded_are_checked_too(workspace: Path) -> None:
    with governed(workspace) as hive:

        @hive.step(persona="dev", ignore=("path",), key="k")
        async def write_file(path: str) -> str:
            return path

        @hive.workflow
        async def write(path: str) -> str:
            return await write_file(path)

        with pytest.raises(RunFailedError, match="protected"):
            hive.run_sync(write, ".env", run_id="r")


def test_a_healer_cannot_change_arguments_to_what_is_forbidden(workspace: Path) -> None:
    with governed(workspace) as hive:
        called = []

        @hive.step(persona="dev", max_attempts=3)
        async def write_file(path: str) -> str:
            called.append(path)
            raise ValueError("not here")

        @hive.healer(ValueError)
        def elsewhere(failure: object) -> dict[str, str]:
            return {"path": "secrets/key"}

        @hive.workflow
        async def write() -> str:
            return await write_file("src/a")

        with pytest.raises(RunFailedError, match="not here"):
            hive.run_sync(write, run_id="r")
    assert set(called) == {"src/a"}
    assert ("secrets/key", False) in [(x["path"], x["allowed"]) for x in audit_lines(workspace)]


def test_the_role_of_a_step_counts_before_that_of_its_persona(workspace: Path) -> None:
    with governed(workspace) as hive:

        @hive.step(persona="dev", role="visitor")
        async def think() -> str:
            return "thought"

        @hive.step(persona="dev")
        async def write_note() -> str:
            return "written"

        @hive.workflow
        async def both() -> list[str]:
            found = [await write_note()]
            try:
                found.append(await think())
            except GovernanceViolation as error:
                found.append(error.violation_type)
            return found

        assert hive.run_sync(both, run_id="r") == ["written", "default_deny"]
        assert [each["role"] for each in audit_lines(workspace)] == ["developer", "visitor"]


# --- approvals ------------------------------------------------------------------------------------


def deploying(hive: Hive, called: list[str]) -> Any:
    @hive.step(persona="dev")
    async def deploy(stage: str) -> str:
        called.append(stage)
        return f"deployed {stage}"

    @hive.workflow
    async def release(*stages: str) -> list[str]:
        found = []
        for stage in stages:
            try:
                found.append(await deploy(stage))
            except GovernanceViolation as error:
                found.append(error.violation_type)
        return found

    return release


def answering(hive: Hive, workflow: Any, stages: list[str], answers: list[bool]) -> Any:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(workflow, *stages, run_id="r"))
        for answer in answers:
            await until(lambda: status(hive) == "waiting" and bool(hive.questions("r")))
            (question,) = hive.questions("r")
            assert question.name == "approve-deploy"
            assert question.about["rule"] == "rules[1]"
            hive.answer("r", question.name, answer, by="eve")
        return await running

    return asyncio.run(main())


def test_what_needs_approval_waits_for_a_person(workspace: Path) -> None:
    called: list[str] = []
    with governed(workspace) as hive:
        release = deploying(hive, called)
        found = answering(hive, release, ["a", "b"], [True, False])
        assert (found, called) == (["deployed a", "approval_refused"], ["a"])
    said = [(each["allowed"], each["violation_type"]) for each in audit_lines(workspace)]
    assert said == [(True, None), (False, "approval_refused")]
    assert audit_lines(workspace)[0]["approved_by"] == "eve"
    assert audit_lines(workspace)[1]["refused_by"] == "eve"


def test_an_approval_is_asked_for_again_after_a_retry(workspace: Path) -> None:
    called: list[str] = []
    with governed(workspace) as hive:

        @hive.step(persona="dev")
        async def deploy() -> str:
            called.append("once")
            return "deployed"

        @hive.workflow
        async def release() -> str:
            return await deploy()

        with pytest.raises(RunFailedError, match="refused by eve"):
            answering(hive, release, [], [False])
        with pytest.raises(RunFailedError, match="refused by eve"):
            hive.run_sync(release, run_id="r")
        hive.retry("r")
        assert answering(hive, release, [], [True]) == "deployed"
        assert called == ["once"]


def test_an_approval_outlives_an_edit_of_the_policy(workspace: Path) -> None:
    called: list[str] = []
    with governed(workspace) as hive:
        release = deploying(hive, called)

        async def stopped() -> None:
            running = asyncio.create_task(hive.run(release, "a", run_id="r"))
            await until(lambda: status(hive) == "waiting")
            running.cancel()
            await asyncio.wait({running})

        asyncio.run(stopped())
        hive.answer("r", "approve-deploy", value=True)
    more = '\n[[rules]]\neffect = "deny"\ntools = ["x"]\n'
    (workspace / "policy.toml").write_text(POLICY.replace("\n[[rules]]", f"{more}\n[[rules]]", 1))
    with governed(workspace) as hive:
        assert hive.run_sync(deploying(hive, called), "a", run_id="r") == ["deployed a"]
    assert audit_lines(workspace)[-1]["rule"] == "rules[2]"


def test_a_cancelled_step_withdraws_its_question(workspace: Path) -> None:
    with governed(workspace) as hive:

        @hive.step(persona="dev")
        async def deploy() -> str:
            return "deployed"

        @hive.workflow
        async def release() -> str:
            try:
                async with hive.timeout(0.05):
                    return await deploy()
            except TimeoutError:
                assert hive.questions("r") == []
                return await hive.wait_for("why")  # type: ignore[no-any-return]

        async def main() -> Any:
            running = asyncio.create_task(hive.run(release, run_id="r"))
            await until(lambda: status(hive) == "waiting" and asked() == ["why"])
            hive.answer("r", "why", "late")
            return await running

        def asked() -> list[str]:
            return [each.name for each in hive.questions("r")]

        assert asyncio.run(main()) == "late"


def test_a_worker_releases_a_run_that_waits_for_approval(workspace: Path) -> None:
    called: list[str] = []
    with governed(workspace) as hive:
        release = deploying(hive, called)

        async def main() -> Any:
            async with hive.worker(release_after=0.05):
                handle = hive.enqueue(release, "a", run_id="r")
                assert await released(hive, "r") is HELD
                hive.answer("r", "approve-deploy", value=True)
                return await handle.result()

        assert asyncio.run(main()) == ["deployed a"]
    assert called == ["a"]
    assert [each["allowed"] for each in audit_lines(workspace)] == [True], "it was decided once"


def test_equal_calls_at_once_ask_a_question_each(workspace: Path) -> None:
    called: list[str] = []
    with governed(workspace) as hive:

        @hive.step(persona="dev")
        async def deploy(stage: str) -> str:
            called.append(stage)
            return stage

        @hive.workflow
        async def release() -> list[Any]:
            calls = [deploy("same"), deploy("same"), deploy("other")]
            return [str(each) for each in await asyncio.gather(*calls, return_exceptions=True)]

        async def main() -> Any:
            running = asyncio.create_task(hive.run(release, run_id="r"))
            await until(lambda: status(hive) == "waiting" and len(hive.questions("r")) == 3)
            asked = hive.questions("r")
            assert len({each.id for each in asked}) == 3
            for number, each in enumerate(asked):
                hive.answer("r", each.name, number != 1, question=each.id)
            return await running

        first, second, third = asyncio.run(main())
    assert (first, third, "it was refused" in second) == ("same", "other", True)
    assert sorted(called) == ["other", "same"]  # which one is called first is not promised


@pytest.mark.parametrize("answer", [True, False])
def test_an_approval_killed_anywhere_is_its_twin(workspace: Path, answer: bool) -> None:
    called: list[str] = []
    hive = governed(workspace)
    release = deploying(hive, called)
    with use(hive) as kit:
        for _ in range(2):
            kit.answer("approve-deploy", answer)
        report = kit.crash_everywhere(release, "a", "b")
    expected = ["deployed a", "deployed b"] if answer else ["approval_refused"] * 2
    assert report.result == expected
    assert report.records >= 6, "it was killed around each question, answer and outcome"


# --- the audit log --------------------------------------------------------------------------------


def test_a_changed_audit_log_suspends_the_run_before_the_next_call(workspace: Path) -> None:
    called: list[Any] = []
    with governed(workspace) as hive:
        write = writing(hive, called)
        hive.run_sync(write, ["src/a"], run_id="one")
        log = workspace / "state" / "audit.jsonl"
        before = log.read_bytes()
        log.write_bytes(b"")
        with pytest.raises(CorruptionError, match="not as it was written"):
            hive.run_sync(write, ["src/b"], run_id="two")
        assert called == [("src/a", None)]
        log.write_bytes(before)
        assert hive.run_sync(write, ["src/b"], run_id="two") == ["wrote src/b"]


def test_where_the_audit_log_is(workspace: Path, tmp_path: Path) -> None:
    with governed(workspace, audit_log=False) as hive:
        hive.run_sync(writing(hive, []), ["src/a"], run_id="r")
        assert not (workspace / "state" / "audit.jsonl").exists()
    with governed(workspace, audit_log=tmp_path / "logs" / "own.jsonl") as hive:
        hive.run_sync(writing(hive, []), ["src/a"], run_id="s")
    (report,) = verify_audit(workspace / "state")
    assert (report.path.name, report.lines, report.anchored) == ("own.jsonl", 1, 1)


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"audit_log": True}, "nothing decides"),
        ({"audit_log": 5}, "audit_log is 5"),
        ({"enforcer": 5}, "the enforcer is 5"),
        ({"policy": "missing.toml"}, "cannot be read"),
        ({"policy": "p.toml", "enforcer": object()}, "given both"),
    ],
)
def test_a_hive_refuses_what_it_cannot_use(
    tmp_path: Path, given: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Hive(tmp_path / "state", **given)


# --- enforcers of callers --------------------------------------------------------------------------


class OriginalEnforcer:
    """Written for the known interface: reads every field of the agent, and answers by attributes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, str]] = []

    def check(
        self,
        agent: AgentContext,
        tool_name: str,
        target_path: str | None = None,
        action: str = "execute",
    ) -> Any:
        self.asked.append((target_path, action))
        facts = (agent.agent_id, agent.role, agent.reputation, agent.current_tokens)
        assert facts == ("dev", "developer_agent", 50, 0)
        assert (agent.recursion_depth, agent.budget_remaining >= 0) == (0, True)
        allowed = target_path is None or not target_path.startswith("secrets")
        return type(
            "Verdict", (), {"allowed": allowed, "reason": "no secrets", "latency_ms": 0.1}
        )()


def test_an_enforcer_of_a_caller_is_asked_about_every_target(workspace: Path) -> None:
    enforcer = OriginalEnforcer()
    called: list[Any] = []
    with Hive(workspace / "state", quick_config(), enforcer=enforcer, workspace=workspace) as hive:
        found = hive.run_sync(
            writing(hive, called), ["a"], ["a", "src/link/key"], ["x", "y"], run_id="r"
        )
    assert found == ["wrote a", "policy_violation secrets/key", "wrote x"]
    assert [path for path, _ in enforcer.asked] == [*"aa", "src/link/key", "secrets/key", *"xy"]


def test_an_enforcer_that_gives_no_verdict_forbids_and_is_recorded(workspace: Path) -> None:
    class Silent:
        def check(self, **_: Any) -> Any:
            return None

    silent: Any = Silent()
    with Hive(workspace / "state", quick_config(), enforcer=silent, workspace=workspace) as hive:
        called: list[Any] = []
        found = hive.run_sync(writing(hive, called), ["a"], run_id="r")
    assert (found, called) == (["policy_violation a"], [])
    (line,) = (workspace / "state" / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["allowed"] is False


class _Broken:
    """An enforcer that raises, or whose verdict does."""

    def __init__(self, where: str) -> None:
        self.where = where

    def check(self, **_: Any) -> Any:
        if self.where == "check":
            raise KeyError("no such rule")
        return self

    @property
    def allowed(self) -> bool:
        raise KeyError("no such rule")


@pytest.mark.parametrize("where", ["check", "allowed"])
def test_an_enforcer_that_raises_forbids_and_is_recorded(workspace: Path, where: str) -> None:
    called: list[Any] = []

    def write_file(path: str) -> None:
        called.append(path)

    enforcer: Any = _Broken(where)
    state = StateConfig(state_dir=str(workspace / "state"))
    executor = PersonaExecutor(
        ExecutionConfig(state=state),
        "dev",
        enforcer=enforcer,
        audit_log_path=str(workspace / "log.jsonl"),
    )
    with executor, pytest.raises(GovernanceViolation) as caught:
        asyncio.run(executor.execute(write_file, "write_file", "src/a"))
    assert called == []
    assert str(caught.value) == (
        "dev (developer_agent) may not use write_file: the enforcer _Broken failed:"
        " KeyError: 'no such rule' (enforcer_failed; path src/a; tool write_file; agent dev)"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.violation_type, caught.value.path) == ("enforcer_failed", "src/a")
    (line,) = (workspace / "log.jsonl").read_text().splitlines()
    facts = json.loads(line)
    assert (facts["allowed"], facts["violation_type"]) == (False, "enforcer_failed")
    assert "no such rule" in facts["message"]


def test_the_context_of_an_agent_takes_its_fields_by_place_and_by_name() -> None:
    by_place = AgentContext("a", "r", 1, 2, 3, 4.0)
    assert by_place == AgentContext(
        agent_id="a",
        role="r",
        reputation=1,
        current_tokens=2,
        recursion_depth=3,
        budget_remaining=4.0,
    )


@pytest.mark.parametrize("durable", [True, False])
def test_an_executor_uses_a_policy_and_cannot_ask(workspace: Path, durable: bool) -> None:
    state = StateConfig(state_dir=str(workspace / "s"), checkpoint_dir=str(workspace / "c"))
    executor = PersonaExecutor(
        ExecutionConfig(state=state),
        "dev",
        workflow_id="w" if durable else None,
        enforcer=PolicyEnforcer.from_file(workspace / "policy.toml", workspace),
        audit_log_path=str(workspace / "log.jsonl"),
    )

    async def write_file(path: Path) -> str:
        return f"wrote {path}"

    async def deploy() -> None: ...

    def execute(task: Callable[..., Any], *args: Any) -> Any:
        return asyncio.run(executor.execute(task, task.__name__, *args))

    with executor:
        found = execute(write_file, workspace / "src" / "a")
        assert found.final_output == f"wrote {workspace / 'src' / 'a'}"
        with pytest.raises(GovernanceViolation, match="protected"):
            execute(write_file, workspace / "src" / ".." / "secrets" / "k")
        with pytest.raises(GovernanceViolation, match="only a step of a Hive can ask") as caught:
            execute(deploy)
        assert caught.value.violation_type == "approval_required"
    (report,) = verify_audit(workspace / "s", workspace / "log.jsonl")
    assert (report.is_intact, report.lines) == (True, 3)
    assert report.anchored == (3 if durable else None)


def test_a_refusal_of_an_executor_is_recorded_and_asked_about_again(workspace: Path) -> None:
    state = StateConfig(state_dir=str(workspace / "s"), checkpoint_dir=str(workspace / "c"))
    calls: list[str] = []

    async def write_file(path: str) -> str:
        calls.append(path)
        return f"wrote {path}"

    def execute() -> Any:
        enforcer = PolicyEnforcer.from_file(workspace / "policy.toml", workspace)
        config = ExecutionConfig(state=state)
        with PersonaExecutor(config, "dev", workflow_id="w", enforcer=enforcer) as executor:
            return asyncio.run(executor.execute(write_file, "write_file", ".env"))

    def recorded() -> list[str]:
        done = maestro("--store", workspace / "s", "events", "w", "--json")
        found = map(json.loads, done.stdout.splitlines())
        return [f"{each['event']} {each.get('error_type')}" for each in found if "name" in each]

    for count in (1, 2):
        with pytest.raises(GovernanceViolation, match="protected"):
            execute()
        assert recorded() == ["step_gave_up GovernanceViolation"] * count
    (workspace / "policy.toml").write_text('default = "allow"')
    assert (execute().final_output, calls) == ("wrote .env", [".env"])
    assert len(recorded()) > 2
    reader = open_store(workspace / "s")
    run = reader.run("w")
    assert run is not None
    assert fold(reader.entries(run.id), reader.load).outcomes == {}
    close_store(reader)


def test_the_budgets_that_processes_share_count_as_what_is_left(workspace: Path) -> None:
    (workspace / "policy.toml").write_text(
        'default = "allow"\n[limits]\nmin_budget_remaining = 500\n'
    )
    with governed(workspace) as hive:

        @hive.step(persona="a", max_tokens=100)
        async def ask(number: int) -> dict[str, int]:
            return {"tokens_used": 100}

        @hive.workflow
        async def asking() -> list[str]:
            found = []
            for number in range(4):
                try:
                    await ask(number)
                    found.append("asked")
                except GovernanceViolation as error:
                    found.append(error.violation_type)
            return found

        found = hive.run_sync(asking, run_id="r", budget=700)
    assert found == ["asked", "asked", "asked", "budget"]
    assert "400 tokens are left, and 500 must be" in audit_lines(workspace)[-1]["message"]


# --- how many at once -----------------------------------------------------------------------------


def test_so_many_personas_work_at_once(workspace: Path) -> None:
    (workspace / "policy.toml").write_text(
        'default = "allow"\n[limits]\nconcurrent_personas = 2\n[roles.slow]\nconcurrent = 1\n'
        '[personas]\nc = "slow"\n'
    )
    working: dict[str, int] = {"all": 0, "c": 0}
    most = dict(working)

    async def work(*names: str) -> None:
        for name in names:
            working[name] += 1
            most[name] = max(most[name], working[name])
        await until(lambda: most["all"] == 2)
        await asyncio.sleep(0.002)
        for name in names:
            working[name] -= 1

    with governed(workspace, audit_log=False) as hive:

        @hive.step(persona="a")
        async def one(number: int) -> None:
            await work("all")

        @hive.step(persona="c")
        async def two(number: int) -> None:
            await work("all", "c")

        @hive.step(persona="a")
        async def outer() -> None:
            await one(99)  # in the place of the outer step

        @hive.workflow
        async def everything() -> None:
            calls = [step(number) for number in range(6) for step in (one, two)]
            await asyncio.gather(*calls)
            await asyncio.gather(outer(), outer())

        hive.run_sync(everything, run_id="r")
    assert most == {"all": 2, "c": 1}


_WORKING = textwrap.dedent("""
    import asyncio, os, sys, time
    from pathlib import Path
    from maestro_hive import Hive

    folder, me, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    hive = Hive(folder / "state", policy=folder / "policy.toml", audit_log=False)
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def other_has_started():
        return any(each.run_id == other for each in hive.runs())

    @hive.step(persona=me)
    async def work(number):
        os.write(log, f"{me} starts\\n".encode())
        while not other_has_started():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        os.write(log, f"{me} ends\\n".encode())

    @hive.workflow
    async def everything():
        await asyncio.gather(*(work(number) for number in range(4)))

    hive.run_sync(everything, run_id=me)
""")


def test_so_many_personas_work_at_once_in_all_processes(workspace: Path) -> None:
    (workspace / "policy.toml").write_text('default = "allow"\n[limits]\nconcurrent_personas = 2\n')
    programs = [PythonProcess(_WORKING, workspace, *names) for names in (("a", "b"), ("b", "a"))]
    for program in programs:
        program.communicate(timeout=PATIENCE_SECONDS)
        assert program.returncode == 0
    lines = (workspace / "log").read_text().splitlines()
    assert sorted(lines) == sorted(
        f"{name} {what}" for name in "ab" for what in ("starts", "ends") for _ in range(4)
    )
    working = list(accumulate(1 if line.endswith("starts") else -1 for line in lines))
    assert max(working) <= 2
    assert working[-1] == 0
