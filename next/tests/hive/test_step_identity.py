"""Which step a call is: its arguments, its defaults, its instance, and who may have its name."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections import Counter, deque
from dataclasses import dataclass
from enum import Flag, auto
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import ConfigurationError, EncodeError, RunFailedError
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


class Mood(Flag):
    CALM = auto()
    GLAD = auto()


class Opaque:
    """A plain object: nothing says what it is after a restart."""

    def __init__(self, name: str) -> None:
        self.name = name


def results(hive: Hive, body: Callable[[], Awaitable[Any]], run_id: str = "r") -> Any:
    """Return what a workflow with that body returns."""

    @hive.workflow(name=f"work-{run_id}")
    async def work() -> Any:
        return await body()

    return hive.run_sync(work, run_id=run_id)


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other",
    [
        (float("nan"), float("inf")),
        (Counter("a"), Counter("ab")),
        (deque([1]), deque([2])),
        (Mood.CALM | Mood.GLAD, Mood.GLAD),
        ({1: 2}, {"1": 2}),
    ],
    ids=repr,
)
def test_calls_with_other_values_have_each_their_own_result(
    hive: Hive, one: object, other: object
) -> None:
    @hive.step
    async def draw(what: str, option: object) -> str:
        return f"a picture of {what} {option!r}"

    async def body() -> list[str]:
        return [await draw("cat", one), await draw("dog", one), await draw("cat", other)]

    assert results(hive, body) == [
        f"a picture of cat {one!r}",
        f"a picture of dog {one!r}",
        f"a picture of cat {other!r}",
    ]


@pytest.mark.parametrize(
    "call, path",
    [
        (lambda step: step("x", Opaque("a")), r"input\.client: a .*Opaque cannot be stored"),
        (lambda step: step("x", 1, more=[Opaque("a")]), r"input\.more\[0\]"),
        (lambda step: step({"of": [Opaque("a")]}, 1), r"input\.prompt\.of\[0\]"),
    ],
)
def test_an_input_that_cannot_be_encoded_is_an_error_that_names_it(
    hive: Hive, call: Any, path: str
) -> None:
    calls: list[str] = []

    @hive.step
    async def ask(prompt: Any, client: object, *, more: object = None) -> None:
        calls.append(prompt)

    with pytest.raises(RunFailedError, match=rf"EncodeError: {path}.*ignore=\(\"") as caught:
        results(hive, lambda: call(ask))
    assert isinstance(caught.value.__cause__, EncodeError)
    assert not calls


def test_a_step_may_leave_arguments_out_by_name(folder: Path) -> None:
    seen: list[tuple[str, str, str, str]] = []

    def run(name: str) -> Any:
        with Hive(folder, quick_config()) as hive:

            @hive.step(ignore=("client", "log", "hidden"))
            async def ask(
                client: Opaque, prompt: str, log: Opaque, model: str = "m", *, hidden: Any = None
            ) -> str:
                seen.append((client.name, prompt, log.name, hidden.name))
                return f"{prompt}!{model}"

            async def body() -> list[str]:
                client, other = Opaque(name), Opaque("log")
                first = await ask(client, "a", other, hidden=client)
                return [first, await ask(client, prompt="b", log=other, model="n", hidden=client)]

            return results(hive, body)

    assert run("one") == run("two") == ["a!m", "b!n"]
    assert seen == [("one", "a", "log", "one"), ("one", "b", "log", "one")]


def test_what_is_left_out_is_not_stored(folder: Path) -> None:
    with Hive(folder, quick_config()) as hive:

        @hive.step(ignore=("token",))
        def ask(token: str, prompt: list[str], *rest: int) -> str:
            return f"{token} {prompt} {rest}"[:3]

        assert results(hive, lambda: ask("abc-secret", ["p"], 1, 2)) == "abc"
    assert not any(b"secret" in each.read_bytes() for each in folder.rglob("*") if each.is_file())


@pytest.mark.parametrize(
    "ignore, message",
    [
        (
            ("clinet",),
            "ignore names 'clinet', which is not an argument; its arguments are client, prompt",
        ),
        ("client", "a tuple with the names of arguments"),
        ((3,), "a tuple with the names of arguments"),
    ],
)
def test_names_to_ignore_are_checked_when_the_step_is_made(
    hive: Hive, ignore: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):

        @hive.step(ignore=ignore)
        async def ask(client: object, prompt: str) -> None: ...


# --- defaults -------------------------------------------------------------------------------------


class Versions:
    """A step whose code changes between the lives of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[str] = []

    def run(self, signature: str, *calls: str) -> list[str]:
        """Run the workflow with a step of that signature, called like that; return new calls."""
        before = len(self.calls)
        scope: dict[str, Any] = {"called": self.calls.append}
        exec(f"async def step({signature}):\n    called(repr(locals()))", scope)
        with Hive(self.folder, quick_config()) as hive:
            scope["step"] = hive.step(scope["step"])

            async def body() -> None:
                for call in calls:
                    await eval(f"step({call})", scope)
                await asyncio.sleep(0)
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                results(hive, body)
        return self.calls[before:]


@pytest.fixture
def versions(folder: Path) -> Versions:
    return Versions(folder)


def test_a_default_that_is_given_is_the_same_as_one_that_is_not(versions: Versions) -> None:
    assert len(versions.run("x, mode='fast'", "1")) == 1
    assert versions.run("x, mode='fast'", "1, 'fast'") == []
    assert versions.run("x, mode='fast'", "x=1, mode='fast'") == []
    assert len(versions.run("x, mode='fast'", "1, 'slow'")) == 1


def test_a_default_is_part_of_the_input(versions: Versions) -> None:
    assert len(versions.run("x, mode='fast'", "1")) == 1
    assert versions.run("x, mode='slow'", "1") == ["{'x': 1, 'mode': 'slow'}"]
    assert versions.run("x, mode='slow'", "1", "1, 'fast'") == []


@pytest.mark.parametrize(
    "before, after, same, other",
    [
        ("x", "x, mode='fast'", "1", "1, 'slow'"),
        ("x", "x, *, mode=('a', 1)", "1", "1, mode=('a', 2)"),
        ("x, old='p'", "x, new='q', old='p'", "1", "1, 'p'"),
        ("x", "x, a=1, b=2, c=3", "1, b=2", "1, b=3"),
        ("x, *rest", "x, *rest, mode=1", "1", "1, mode=2"),
        ("", "mode=None", "", "0"),
    ],
)
def test_a_call_with_the_default_of_a_new_argument_is_the_call_before_it_was_there(
    versions: Versions, before: str, after: str, same: str, other: str
) -> None:
    first = "1" if "x" in before else ""
    assert len(versions.run(before, first)) == 1
    assert versions.run(after, same) == []
    assert len(versions.run(after, same, other)) == 1
    assert versions.run(after, same, other) == []


def test_an_argument_that_gets_or_loses_its_default_changes_nothing(versions: Versions) -> None:
    assert len(versions.run("x, mode", "1, 'fast'", "1, 'slow'")) == 2
    assert versions.run("x, mode='fast'", "1", "1, 'slow'") == []
    assert len(versions.run("x, mode='fast'", "2")) == 1
    assert versions.run("x, mode", "2, 'fast'") == []


def test_a_new_argument_with_another_value_is_no_call_from_before(versions: Versions) -> None:
    assert len(versions.run("x, a='p'", "1, 'z'")) == 1
    assert len(versions.run("x, b='p', a='p'", "1, b='z'")) == 1


# --- methods --------------------------------------------------------------------------------------


class Named:
    """An agent with a client that cannot be stored, and a name."""

    def __init__(self, name: str) -> None:
        self.step_identity = name
        self.lock = Opaque("lock")


def agents(hive: Hive, calls: list[str]) -> type[Any]:
    """Return a class with steps as methods; on each hive its own."""

    class Reader(Named):
        @hive.step
        def research(self, topic: str, *, depth: int = 1) -> str:
            """Find out about a topic."""
            calls.append(f"{self.step_identity} {topic} {depth}")
            assert self.lock.name == "lock"
            return f"{self.step_identity}: {topic}"

        @hive.step(name="ask")
        async def ask(self, topic: str) -> str:
            return topic

    return Reader


def test_a_method_is_a_step_of_its_instance(folder: Path) -> None:
    calls: list[str] = []
    with Hive(folder, quick_config()) as hive:
        reader = agents(hive, calls)

        async def body() -> list[str]:
            named, other, again = reader("a"), reader("b"), reader("a")
            return [
                *await asyncio.gather(named.research("x"), other.research("x")),
                await again.research(topic="x", depth=1),
                await reader.research(again, "y"),
            ]

        made = results(hive, body)
    assert made == ["a: x", "b: x", "a: x", "a: y"]
    assert Counter(calls) == Counter(["a x 1", "a x 1", "b x 1", "a y 1"])  # equal calls are two
    assert reader.research.name == "Reader.research"
    assert reader.ask.name == "ask"
    assert reader.research.function(reader("a"), "t") == "a: t"


def test_equal_instances_share_a_result_after_a_restart(folder: Path) -> None:
    calls: list[str] = []

    def run(role: str) -> Any:
        with Hive(folder, quick_config()) as hive:
            reader = agents(hive, calls)

            async def body() -> str:
                found: str = await reader(role).research("x")
                if role == "poet":
                    raise KeyboardInterrupt
                return found

            return results(hive, body)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run("poet")
    assert calls == ["poet x 1"]
    assert run("critic") == "critic: x"
    assert calls == ["poet x 1", "critic x 1"]


def test_an_instance_without_an_identity_is_an_error_that_says_what_to_do(hive: Hive) -> None:
    class Tool(Opaque):
        @hive.step
        async def use(self) -> None: ...

        @hive.step(ignore=("self",))
        async def use_any(self, what: str) -> str:
            return f"{self.name} {what}"

        @hive.step(key="{self.name}-{what}")
        async def use_by_key(self, what: str) -> str:
            return f"{self.name} {what}"

    with pytest.raises(RunFailedError) as caught:
        results(hive, Tool("a").use, "failed")
    for part in ("'Tool.use'", "step_identity", "dataclass", "register_codec", '("self",)'):
        assert part in str(caught.value)
    assert results(hive, lambda: Tool("a").use_any("x"), "any") == "a x"

    async def body() -> list[str]:
        return [await Tool(name).use_by_key("x") for name in "aba"]

    assert results(hive, body, "key") == ["a x", "b x", "a x"]


@pytest.mark.parametrize("bad", ["", 3, lambda: "x"])
def test_an_identity_is_a_text(hive: Hive, bad: object) -> None:
    class Tool:
        step_identity = bad

        @hive.step
        async def use(self) -> None: ...

    tool = Tool()
    with pytest.raises(RunFailedError, match=r"the step_identity of a .*Tool.*'Tool.use'"):
        results(hive, tool.use)


def test_static_and_class_methods_are_steps_below_their_decorator(hive: Hive) -> None:
    class Tool:
        @staticmethod
        @hive.step
        async def add(one: int, two: int) -> int:
            return one + two

        @classmethod
        @hive.step
        async def kind(cls, what: str) -> str:
            return f"{cls.__name__} {what}"

    class Saw(Tool): ...

    tool: Any = Tool
    saw: Any = Saw

    async def body() -> list[Any]:
        return [
            await tool.add(1, 2),
            await tool().add(1, 2),
            await tool.kind("a"),
            await saw.kind("a"),
            await saw().kind("a"),
        ]

    assert results(hive, body) == [3, 3, "Tool a", "Saw a", "Saw a"]
    kinds: list[Any] = [staticmethod, classmethod]
    for kind in kinds:
        with pytest.raises(ConfigurationError, match=f"put @hive.step below @{kind.__name__}"):
            hive.step(kind(lambda _: None))


# --- names ----------------------------------------------------------------------------------------


def test_a_module_that_is_reloaded_defines_its_steps_again(
    hive: Hive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = tmp_path / "reloaded_steps.py"
    text = """
    import functools

    def counted(function):
        @functools.wraps(function)
        async def call(*args):
            return await function(*args)
        return call

    def define(hive):
        @hive.step
        @counted
        async def one(x, mode="fast"):
            return VALUE

        def make(name):
            @hive.step(name="tool-" + name)
            async def tool():
                return name
            return tool

        @hive.workflow
        async def work():
            return await one(1)

        make("a"), make("b")
        return one
    """
    for number in range(3):
        source.write_text("#\n" * number + dedent(text).replace("VALUE", str(number)))
        module = importlib.import_module("reloaded_steps")
        module = importlib.reload(module) if number else module
        step = module.define(hive)
    assert results(hive, lambda: step(1)) == 2


def test_a_cell_that_is_run_again_defines_its_steps_again(hive: Hive) -> None:
    scope: dict[str, Any] = {"hive": hive, "__name__": "__main__"}
    for number in range(3):
        cell = f"@hive.step\nasync def cell(x):\n    return {number}\n"
        exec(compile("\n" * number + cell, f"<cell {number % 2}>", "exec"), scope)
    assert results(hive, lambda: scope["cell"](1)) == 2


@pytest.mark.parametrize("key", [lambda _: 3, lambda _: None, lambda _: "", "{text}"])
def test_a_key_that_is_no_text_is_refused(hive: Hive, key: Any) -> None:
    @hive.step(key=key)
    async def work(text: str) -> str:
        return text

    @hive.workflow
    async def works() -> str:
        return await work("\ud800")  # has no form in UTF-8

    with pytest.raises(RunFailedError, match=r"the key of step 'work' is .* and must be a text"):
        hive.run_sync(works)


def test_a_key_that_names_no_argument_is_refused_where_the_step_is_made(hive: Hive) -> None:
    with pytest.raises(ConfigurationError, match=r"step 'send': key names 'nope', .* number, mail"):

        @hive.step(key="invoice-{nope}")
        async def send(number: int, mail: object) -> None: ...


def test_equal_keys_share_a_result_whatever_the_other_arguments_are(hive: Hive) -> None:
    calls: list[int] = []

    @hive.step(key="invoice-{number}")
    async def send(number: int, mailer: object) -> int:
        calls.append(number)
        return number

    async def body() -> list[int]:
        return [await send(1, object()), await send(1, object()), await send(2, object())]

    assert results(hive, body) == [1, 1, 2]
    assert calls == [1, 2]


# --- instances that are encoded -------------------------------------------------------------------


@dataclass
class Agent:
    role: str
    size: int = 1


def writers(hive: Hive, calls: list[str]) -> type[Any]:
    class Writer(Agent):
        @hive.step(persona="writer")
        async def research(self, topic: str, *, depth: int = 1) -> str:
            calls.append(f"{self.role} {topic} {depth}")
            return f"{self.role}: {topic}"

    Writer.__qualname__ = "Writer"
    globals()["Writer"] = Writer  # as if it were defined there
    return Writer


def test_a_method_is_a_step_of_an_instance_that_is_encoded(hive: Hive) -> None:
    calls: list[str] = []
    writer = writers(hive, calls)

    async def body() -> list[str]:
        one, two = writer("poet"), writer("critic")
        return [await one.research("x"), await two.research("x"), await one.research(topic="x")]

    assert results(hive, body) == ["poet: x", "critic: x", "poet: x"]
    assert calls == ["poet x 1", "critic x 1", "poet x 1"]  # equal calls are two steps


def test_a_step_of_a_module_may_be_an_attribute_of_a_class(hive: Hive) -> None:
    @hive.step
    async def role_of(agent: Agent) -> str:
        return agent.role

    class Team(Agent):
        own_role = role_of

    async def body() -> list[str]:
        return [await role_of(Agent("a")), await Team.own_role(Agent("b"))]

    assert results(hive, body) == ["a", "b"]


# --- classes of the program that is started -------------------------------------------------------


APP = """
    from dataclasses import dataclass
    from enum import Enum
    from pathlib import Path

    from maestro_hive.hive.hive import Hive

    hive = Hive(Path(__file__).parent / "state")

    class Size(Enum):
        BIG = 1

    @dataclass
    class Part:
        name: str
        size: Size = Size.BIG

        @hive.step
        async def paint(self):
            print("painting", self.name)
            return self

    @hive.step
    async def build(part, size=Size.BIG):
        print("building", part.name)
        return part

    @hive.workflow
    async def work(part):
        await (await build(part)).paint()
        raise KeyboardInterrupt

    def main():
        hive.run_sync(work, Part("door"), run_id="r")

    if __name__ == "__main__":
        main()
"""


def test_classes_of_the_main_program_are_those_of_its_module(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(dedent(APP))
    outputs = []
    for code in (["app.py"], ["-m", "app"], ["-c", "import app; app.main()"]):
        made = subprocess.run(
            [sys.executable, *code], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert made.stderr.rstrip().endswith("KeyboardInterrupt"), made.stderr
        outputs.append(made.stdout)
    assert outputs == ["building door\npainting door\n", "", ""]
