"""What this project adds to the format of a graph: personas, gates, budgets and retries."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from maestro_hive.team.graph.commands import PROMPT_ADVICE, is_prompt_in_script
from maestro_hive.team.graph.problems import advised, quoted
from maestro_hive.team.graph.records import (
    AGENTS,
    PERMISSIONS,
    Budget,
    Gate,
    Persona,
    Retry,
    read_from,
)
from maestro_hive.team.graph.values import ID, ID_ADVICE, Values, keys

if TYPE_CHECKING:
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph.documents import Path

#: More personas than these are refused.
MAX_PERSONAS = 1000
#: The engine counts money in millionths of a US dollar.
_LEAST_USD = 0.000001
#: Of a gate, which is a step of that name.
_LONGEST_NAME = 100

_PERSONA_KEYS = keys(
    "command python agent model args permissions timeout_seconds budget retry",
    timeout="timeout_seconds",
)
_PYTHON = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")


class Additions(Values):
    """Reads what this project adds."""

    def personas(self, tree: dict[str, Json]) -> list[Persona]:
        """Read the personas, by name."""
        value = tree.get("personas")
        if value is None:
            return []
        if type(value) is not dict:
            self._problems.wrong_type(("personas",), value, "a map of personas by name")
            return []
        if len(value) > MAX_PERSONAS:
            self._problems.error(
                "too-many-personas",
                ("personas",),
                f"the graph has {len(value):,} personas, and the limit is {MAX_PERSONAS:,}",
                "remove those that no task names",
            )
            return []
        found = []
        for name, each in value.items():
            at: Path = ("personas", name)
            if not ID.fullmatch(name):
                self._problems.error("bad-id", at, f"{quoted(name)} is no name", ID_ADVICE)
            elif (persona := self._persona(name, each, at)) is not None:
                found.append(persona)
        return found

    def persona(self, owner: dict[str, Json], at: Path) -> str | Persona | None:
        """Read who does the work: the name of a persona, or a persona."""
        value = owner.get("persona")
        if value is None or type(value) is str:
            return value
        # All calls of an agent share its breaker and are counted together, as under its own name.
        agent = value.get("agent") if type(value) is dict else None
        name = agent if agent in AGENTS else owner.get("id")
        return self._persona(name if isinstance(name, str) else "default", value, (*at, "persona"))

    def _persona(self, name: str, value: Json, at: Path) -> Persona | None:
        if type(value) is not dict:
            self._problems.wrong_type(at, value, "an object with 'command', 'python' or 'agent'")
            return None
        self.judge_keys(value, at, _PERSONA_KEYS)
        kinds = [key for key in ("command", "python", "agent") if value.get(key) is not None]
        if len(kinds) != 1:
            self._problems.error(
                "bad-persona",
                at,
                f"the persona has {' and '.join(kinds) or 'no command'}",
                "give it exactly one of 'command', 'python' and 'agent'",
            )
            return None
        before = len(self._problems.errors) + self._problems.more_errors
        persona = Persona(
            name=name,
            command=self._arguments(value, at),
            python=self._function(value, at),
            agent=self._one_of(value, "agent", at, AGENTS),
            model=self.text(value, "model", at),
            args=self.texts(value, "args", at),
            permissions=self._one_of(value, "permissions", at, PERMISSIONS),
            timeout_seconds=self.seconds(value, at),
            budget=self.budget(value, at),
            retry=self.retry(value, at),
            source=value,
        )
        failed = len(self._problems.errors) + self._problems.more_errors > before
        return None if failed else read_from(persona)

    def _function(self, owner: dict[str, Json], at: Path) -> str | None:
        value = self.text(owner, "python", at)
        if value is not None and not _PYTHON.fullmatch(value):
            wanted = "a function as 'package.module:name'"
            self._bad_persona((*at, "python"), value, wanted, f"write {wanted}")
        return value

    def _one_of(
        self, owner: dict[str, Json], key: str, at: Path, known: tuple[str, ...]
    ) -> str | None:
        value = self.text(owner, key, at)
        if value is not None and value not in known:
            wanted = f"one of {', '.join(known)}"
            advice = advised(value, known, f"write {wanted}")
            self._bad_persona((*at, key), value, wanted, advice)
        return value

    def _bad_persona(self, at: Path, value: str, wanted: str, advice: str) -> None:
        self._problems.error("bad-persona", at, f"{quoted(value)} is not {wanted}", advice)

    def _arguments(self, owner: dict[str, Json], at: Path) -> tuple[str, ...] | None:
        """Return the arguments of a command: a list, or a text that is split as a shell does."""
        value = owner.get("command")
        if value is None:
            return None
        inside: Path = (*at, "command")
        if type(value) is list:
            words = self.text_items(value, inside)
        elif (command := self.command(value, inside, "the persona")) is None:
            return None
        else:
            try:
                words = tuple(shlex.split(command))
            except ValueError as error:
                self._problems.error(
                    "not-executable",
                    inside,
                    f"the command cannot be split into words: {error}",
                    "close its quotes",
                )
                return None
        if not words or not words[0] or any("\0" in word for word in words):
            self._problems.error(
                "not-executable", inside, "the command has no program", "write one, with arguments"
            )
        if is_prompt_in_script(words):
            self._problems.error(
                "prompt-in-script",
                inside,
                "{prompt} stands in the script of a shell, which would execute what titles and"
                " feedback say",
                PROMPT_ADVICE,
            )
        return words

    def budget(self, owner: dict[str, Json], at: Path) -> Budget | None:
        """Read a budget: an object with ``tokens`` and ``usd``, or tokens alone."""
        value = owner.get("budget")
        if value is None:
            return None
        inside: Path = (*at, "budget")
        if type(value) is int:
            tokens = self.whole(owner, "budget", at, least=1, most=10**15)
            return None if tokens is None else read_from(Budget(tokens=tokens, source=value))
        if type(value) is not dict:
            self._problems.wrong_type(inside, value, "an object with 'tokens' or 'usd'")
            return None
        self.only(value, inside, ("tokens", "usd"))
        tokens = self.whole(value, "tokens", inside, least=1, most=10**15)
        usd = self.number(value, "usd", inside, most=1e9, least=_LEAST_USD)
        if value.get("tokens") is None and value.get("usd") is None:
            self._problems.error(
                "empty-budget", inside, "the budget has no limit", "add 'tokens' or 'usd'"
            )
        return read_from(Budget(tokens=tokens, usd=usd, source=value))

    def retry(self, owner: dict[str, Json], at: Path) -> Retry | None:
        """Read how often something is tried: an object, or the number of attempts."""
        value = owner.get("retry")
        if value is None:
            return None
        if type(value) is int:
            attempts = self.whole(owner, "retry", at, least=1, most=1000)
            return (
                None if attempts is None else read_from(Retry(max_attempts=attempts, source=value))
            )
        inside: Path = (*at, "retry")
        if type(value) is not dict:
            self._problems.wrong_type(inside, value, "an object with 'max_attempts'")
            return None
        self.only(value, inside, ("max_attempts", "rounds", "max_handovers"))
        return read_from(
            Retry(
                max_attempts=self.whole(value, "max_attempts", inside, least=1, most=1000),
                rounds=self.whole(value, "rounds", inside, least=1, most=100),
                max_handovers=self.whole(value, "max_handovers", inside, least=0, most=1000),
                source=value,
            )
        )

    def output_schema(self, owner: dict[str, Json], at: Path) -> dict[str, Json] | None:
        """Read the JSON Schema of a result; whether it is one is found out before anything starts."""
        value = owner.get("output_schema")
        if value is None or type(value) is dict:
            return value
        self._problems.wrong_type((*at, "output_schema"), value, "a JSON Schema: an object")
        return None

    def gates(self, level: dict[str, Json], at: Path) -> tuple[Gate, ...]:
        """Read the gates of a level."""
        value = level.get("gates")
        if value is None:
            return ()
        if type(value) is not list:
            self._problems.wrong_type((*at, "gates"), value, "a list of gates")
            return ()
        found: dict[str, Gate] = {}
        for number, each in enumerate(value):
            gate = self._gate(each, place := (*at, "gates", number))
            if gate is not None and found.setdefault(gate.name, gate) is not gate:
                self._problems.error(
                    "duplicate-gate",
                    place,
                    f"two gates of the level are called {quoted(gate.name)}",
                    "give one of the two another name",
                )
        return tuple(found.values())

    def _gate(self, value: Json, at: Path) -> Gate | None:
        if type(value) is not dict:
            self._problems.wrong_type(at, value, "a gate: an object with 'name' and 'command'")
            return None
        self.only(value, at, ("name", "command", "required", "timeout_seconds"))
        if value.get("command") is None:
            self.missing(at, "command", "the gate", "what must succeed")
            return None
        command = self.command(value["command"], (*at, "command"), "the gate")
        name = self.text(value, "name", at)
        if name and not (name.isprintable() and name.strip() and len(name) <= _LONGEST_NAME):
            self._problems.error(
                "bad-gate",
                (*at, "name"),
                f"{quoted(name)} is no name for a gate",
                f"write up to {_LONGEST_NAME} characters in one line",
            )
        required = self.flag(value, "required", at, default=True)
        timeout = self.seconds(value, at)
        if command is None:
            return None
        return read_from(
            Gate(
                name=name or f"gate {int(at[-1]) + 1}",
                command=command,
                required=required,
                timeout_seconds=timeout,
                source=value,
            )
        )
