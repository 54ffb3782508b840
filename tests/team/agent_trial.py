"""Calls a real agent by its adapter, in a network of its own where a model server listens.

``python -m tests.team.agent_trial AGENT TRIAL FOLDER`` prints what happened as JSON. It is started with
``unshare``: agents call home, and here there is nothing but loopback.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.team.agents import (
    Acted,
    Call,
    Outcome,
    Permissions,
    SessionKnown,
    Totals,
    Used,
    Waiting,
    adapter,
)
from tests.hive.model_server import Reply
from tests.team.model_apis import ModelApis

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.team.agents import Event, Session

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
MODELS = {
    "claude": "claude-sonnet-4-5",
    "codex": "gpt-5",
    "gemini": "gemini-2.5-pro",
    "opencode": "loop/model",
    "qwen": "qwen3-coder",
    "aider": "openai/gpt-4.1",
}
#: What aider's models answer to have a file written; the others have a tool for it.
BLOCK = "made.txt\n```\n<<<<<<< SEARCH\n=======\nwritten\n>>>>>>> REPLACE\n```\n"


def raise_loopback() -> None:
    """Let the loopback interface of a new network namespace work."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)
        fcntl.ioctl(control, 0x8914, up)  # SIOCSIFFLAGS


@dataclass(kw_only=True)
class Trial:
    """One agent, its home and the folder it works in."""

    agent: str
    folder: Path
    server: ModelApis
    session: Session | None = None
    events: list[Event] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("home", "work", "call"):
            (self.folder / name).mkdir()
        self.session = adapter(self.agent).new_session(str(self.folder))
        if self.agent == "codex":
            (self.home / ".codex").mkdir()
            (self.home / ".codex/config.toml").write_text(
                f'model_provider = "loop"\n[model_providers.loop]\nname = "loop"\n'
                f'base_url = "{self.server.url}/v1"\nenv_key = "OPENAI_API_KEY"\n'
                'wire_api = "responses"\n'
            )
        if self.agent == "gemini":
            (self.home / ".gemini").mkdir()
            settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
            (self.home / ".gemini/settings.json").write_text(json.dumps(settings))

    @property
    def args(self) -> tuple[str, ...]:
        """Further arguments, which a graph would give."""
        return ("--auth-type=openai",) if self.agent == "qwen" else ()

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def environment(self) -> dict[str, str]:
        url = self.server.url
        models = {"model": {"name": "model", "limit": {"context": 100_000, "output": 1_000}}}
        options = {"baseURL": f"{url}/v1", "apiKey": "key"}
        provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "key",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_RETRIES": "2",
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": "key",
            "GEMINI_API_KEY": "key",
            "GOOGLE_GEMINI_BASE_URL": url,
            "OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"loop": provider}}),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }

    def call(self, prompt: str, *, until: Callable[[], bool] | None = None, **more: Any) -> Outcome:
        """Call the agent; ``until`` it is killed, after an event."""
        known = adapter(self.agent)
        call = Call(
            prompt=prompt,
            folder=str(self.folder / "call"),
            model=MODELS[self.agent],
            session=self.session,
            args=self.args,
            **{"permissions": Permissions.EDIT, **more},
        )
        command = known.command(call)
        self.session = command.session
        for path, text in command.files.items():
            Path(path).write_text(text)
        with subprocess.Popen(
            command.argv,
            cwd=self.work,
            env={**self.environment(), **command.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr").open("w"),
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdin is not None
            process.stdin.write(command.stdin)
            process.stdin.close()
            if until is not None:
                self._kill_when(process, until)
            reader = known.reader(call)
            assert process.stdout is not None
            for line in process.stdout:
                self._take(reader.feed(line))
        outcome = reader.end(process.returncode, (self.folder / "stderr").read_text())
        self._take(list(outcome.events))
        self.session = outcome.session or self.session
        self.outcomes.append(outcome)
        return outcome

    def _kill_when(self, process: subprocess.Popen[str], until: Callable[[], bool]) -> None:
        while not until() and process.poll() is None:
            self.server.stopping.wait(0.02)
        self.server.stopping.wait(1)  # what it knows is on its disk, or would be too late
        os.killpg(process.pid, signal.SIGKILL)

    def _take(self, events: list[Event]) -> None:
        """Record what an engine would."""
        self.events += events
        for each in events:
            if isinstance(each, SessionKnown):
                self.session = each.session
            if isinstance(each, Used) and each.session is not None:
                self.session = each.session

    def writes(self, **numbers: Any) -> Reply:
        """Return a reply that has a file written."""
        path = {"content": "written\n", "file_path": str(self.work / "made.txt")}
        match self.agent:
            case "claude":
                return Reply(tool="Write", arguments=path, **numbers)
            case "codex":
                command = {"cmd": "echo written > made.txt"}
                return Reply(tool="exec_command", arguments=command, **numbers)
            case "opencode":
                path["filePath"] = path.pop("file_path")
                return Reply(tool="write", arguments=path, **numbers)
            case "aider":
                return Reply(text=BLOCK, **numbers)
            case _:
                return Reply(tool="write_file", arguments=path, **numbers)

    def report(self) -> dict[str, Any]:
        """Return what happened."""
        used = Totals()
        for each in self.events:
            used = used.plus(each.amount) if isinstance(each, Used) else used
        last = self.outcomes[-1]
        return {
            "failures": [each.failure and each.failure.kind for each in self.outcomes],
            "messages": [each.failure and each.failure.message for each in self.outcomes],
            "text": last.text,
            "structured": last.structured,
            "denied": last.denied,
            "sessions": [each.session and each.session.id for each in self.outcomes],
            "acted": [each.tool for each in self.events if isinstance(each, Acted)],
            "waited": [each.kind for each in self.events if isinstance(each, Waiting)],
            "reported": used._asdict(),
            "served": dict(self.server.used),
            "asked": len(self.server.conversation()),
            # What only the tool call of an earlier request has named.
            "remembers": "made.txt" in json.dumps(self.server.conversation()[-1:]),
            "made": _text(self.work / "made.txt"),
            "left": sorted(each.name for each in self.work.iterdir()),
        }


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


# --- the trials -----------------------------------------------------------------------------------


def answer(trial: Trial) -> None:
    """A tool call and an answer, then another call in the same session."""
    trial.server.replies = [
        trial.writes(input=51, cached=1, written=2, output=9),
        Reply(text="first", input=61, cached=2, written=3, output=8),
    ]
    if trial.agent == "aider":
        del trial.server.replies[1]
    trial.call("--yolo /write the file made.txt")
    trial.server.replies = [Reply(text="second", input=71, cached=3, written=4, output=7)]
    trial.call("again", feedback="x" * 9_000)


def killed(trial: Trial) -> None:
    """Killed in the middle of its second request, and resumed."""
    asked = trial.server.hang_at = 1 if trial.agent == "aider" else 2
    trial.server.replies = [trial.writes(input=51, cached=1, written=2, output=9)]
    trial.call("write the file", until=lambda: len(trial.server.conversation()) >= asked)
    trial.server.hang_at = 0
    trial.server.replies = [Reply(text="resumed", input=61, cached=2, written=3, output=8)]
    trial.call("write the file")


def unanswered(trial: Trial) -> None:
    """Killed before the first answer: there may be no session to resume."""
    trial.server.hang_at = 1
    trial.call("the first prompt", until=lambda: bool(trial.server.conversation()))
    trial.server.hang_at = 0
    outcome = trial.call("the first prompt")
    if outcome.try_again_now:
        trial.call("the first prompt")


def limited(trial: Trial) -> None:
    """Too many requests, for good where the agent gives up soon."""
    trial.server.faults = ["model:429@1"] * (40 if trial.agent in {"claude", "codex"} else 1)
    trial.call("hello")


def refused(trial: Trial) -> None:
    """A key that is not accepted."""
    trial.server.faults = ["any:401"] * 40
    trial.call("hello")


def full(trial: Trial) -> None:
    """A context that is full, and stays so."""
    trial.server.faults = ["any:413"] * 40
    trial.call("hello")


def structured(trial: Trial) -> None:
    """A result against a schema."""
    tool = {"claude": "StructuredOutput", "qwen": "structured_output"}.get(trial.agent)
    trial.server.replies = [Reply(text='{"n": 3}', tool=tool, arguments={"n": 3})]
    trial.call("count", schema=SCHEMA)


def own(trial: Trial) -> None:
    """A tool call that nobody has permitted."""
    trial.server.replies = [trial.writes()]
    trial.call("write the file", permissions=Permissions.OWN)


def session_used_twice(trial: Trial) -> None:
    """A session that exists and is started again."""
    trial.call("hello")
    assert trial.session is not None
    trial.session = replace(trial.session, started=False)
    trial.call("hello")
    trial.call("hello")


def in_a_team(trial: Trial) -> dict[str, Any]:
    """Do a task of a graph; the engine is killed in the middle of a request, and resumed."""
    persona = {
        "agent": trial.agent,
        "model": MODELS[trial.agent],
        "permissions": "edit",
        "args": trial.args,
    }
    tasks = [{"id": "A", "title": "Write the file", "verification": "grep written *.txt"}]
    graph = trial.folder / "graph.json"
    graph.write_text(json.dumps({"feature": "f", "persona": persona, "tasks": tasks}))

    asked = trial.server.hang_at = 1 if trial.agent == "aider" else 2
    trial.server.replies = [trial.writes(input=51, cached=1, written=2, output=9)]
    with subprocess.Popen(_maestro("run", graph), **_streams(trial)) as engine:
        while len(trial.server.conversation()) < asked and engine.poll() is None:
            trial.server.stopping.wait(0.02)
        trial.server.stopping.wait(1)  # what the agent knows is on its disk, or would be too late
        engine.kill()
    trial.server.hang_at = 0
    numbers: dict[str, Any] = {"input": 61, "cached": 2, "written": 3, "output": 8}
    is_done = trial.agent != "aider"  # it was killed in its only request
    trial.server.replies = [
        Reply(text="resumed", **numbers) if is_done else trial.writes(**numbers)
    ]
    done = subprocess.run(_maestro("resume"), **_streams(trial), check=False)
    status = subprocess.run(_maestro("status", "--json"), **_streams(trial), check=True)
    return {
        "code": done.returncode,
        "printed": done.stdout,
        "run": json.loads(status.stdout)["run"],
        "served": dict(trial.server.used),
        "remembers": "made.txt" in json.dumps(trial.server.conversation()[-1:]),
    }


def _maestro(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "maestro_hive", *map(str, words)]


def _streams(trial: Trial) -> dict[str, Any]:
    state = str(trial.folder / "state")
    return {
        "cwd": trial.work,
        "env": {**trial.environment(), "MAESTRO_STATE_DIR": state},
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
    }


TRIALS = {
    each.__name__: each
    for each in (
        *(answer, killed, unanswered, limited, refused, full, structured, own),
        *(session_used_twice, in_a_team),
    )
}


def main() -> None:
    agent, name, folder = sys.argv[1:]
    raise_loopback()
    with ModelApis(tools=agent != "aider") as server:
        trial = Trial(agent=agent, folder=Path(folder), server=server)
        report = TRIALS[name](trial) or trial.report()
        sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
