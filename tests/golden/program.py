"""The program whose runs are in the golden state folders: everything that can be stored, once.

``tests.golden.make`` executed it, and interrupted some of its runs; ``test_golden.py`` resumes them.
So it may be added to, and what is recorded of it in a golden folder must not be changed: names of
steps, workflows and classes, their inputs, and the order of calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, auto
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
from pydantic import BaseModel, Field, PrivateAttr

from maestro_hive import ExecutionConfig, Hive, RunFailedError, current, failure_of, register_codec
from maestro_hive.unified_execution import Level1Config, Level2Config

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Of definitions alone: the runs are executed by the hives that ``opened`` returns.
hive = Hive("unused")
#: As the program was when the run ``changed`` was started.
before = Hive("unused")

#: What was called in this process: steps that are not recorded as completed.
calls: list[str] = []
#: What happens in a step ``interrupted``, by the name it is given; nothing, if there is no such name.
interruptions: dict[str, Callable[[], Awaitable[None]]] = {}
#: Which services are down: the steps that need one of them fail.
down: set[str] = set()

_CENTURY = 100 * 365 * 86_400.0


def config(**level2: Any) -> ExecutionConfig:
    """Return settings with short waits between attempts and rounds."""
    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0.001, jitter=0),
        level2=Level2Config(
            base_delay_seconds=0.001, jitter=0, circuit_breaker_threshold=1000, **level2
        ),
    )


def opened(folder: Path, **helpers: Any) -> Hive:
    """Return a hive that executes this program in a folder."""
    prices = {"golden-1": {"input": 1, "output": 2}}
    given = helpers.pop("config", config())
    made = Hive(folder, given, cancel_grace=_CENTURY, prices=prices, **helpers)
    known = (values, sizes, work, errors, family, ask, tidied, released, changed, called, bought)
    for each in (*known, streamed, paid, shipped):
        made._known(each)
    return made


# --- values ---------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


class Access(Flag):
    READ = auto()
    WRITE = auto()


@dataclass
class Part:
    name: str
    count: int = 1
    made: str = field(init=False, default="here")


class Point(NamedTuple):
    x: int
    y: float = 0.0


class User(BaseModel):
    name: str = Field(alias="userName")
    age: int = 30
    _token: str = PrivateAttr(default="")


class Money:
    """A class with a registered codec."""

    def __init__(self, amount: int, currency: str) -> None:
        self.amount = amount
        self.currency = currency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.amount, self.currency))


register_codec(
    Money,
    encode=lambda money: (money.amount, money.currency),
    decode=lambda stored: Money(*stored),
    name="golden-money",
)


def _user() -> User:
    user = User(userName="Ada")
    user._token = "t"
    return user


def one_of_each() -> dict[str, Any]:
    """Return a value of each kind that can be stored; its keys are not sorted."""
    return {
        "plain": [None, True, False, 0, -3, 10**30, "", 'é "\\ \n \u2028 🐝', 0.1, -0.0, 1e300],
        "float": [math.nan, math.inf, -math.inf],
        "complex": [1 + 2j, complex(-0.0, math.inf)],
        "dict": {"b": 1, "a": {"$": "escaped"}, "": [], "empty": {}},
        "keys": {1: "a", (2, 3): "b", None: "c", date(2030, 1, 1): "e"},
        "tuple": (1, "a", (), [(2,)]),
        "set": {3, 1, 2},
        "frozenset": frozenset({"b", "a"}),
        "range": range(1, 9, 2),
        "bytes": [b"", b"abc\xff", bytearray(b"abc")],
        "counter": Counter({"b": 1, "a": 2}),
        "ordereddict": OrderedDict([("b", 1), ("a", 2)]),
        "defaultdict": [
            defaultdict(list, {"b": [1], "a": []}),
            defaultdict(None, {1: 2}),
            *(defaultdict(kind) for kind in (int, dict, set, str, float, bool, tuple)),
        ],
        "deque": [deque([1, 2]), deque([1], maxlen=3)],
        "decimal": [Decimal("1.10"), Decimal("NaN")],
        "fraction": Fraction(-1, 3),
        "datetime": [
            datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
            datetime(2030, 1, 2, 3, 4),  # noqa: DTZ001 - one without a zone
            datetime(2030, 1, 2, tzinfo=timezone(timedelta(hours=-5), "EST")),
            datetime(2030, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        ],
        "date": date(2030, 1, 2),
        "time": [time(3, 4), time(3, 4, tzinfo=timezone(timedelta(hours=1)))],
        "timedelta": timedelta(days=-1, seconds=5, microseconds=7),
        "timezone": [UTC, timezone(timedelta(hours=1)), timezone(timedelta(hours=1), "CET")],
        "zoneinfo": ZoneInfo("Europe/Berlin"),
        "uuid": UUID(int=7),
        "path": [Path("a/b"), PurePosixPath("a/b"), PureWindowsPath("a/b")],
        "enum": Colour.RED,
        "flag": [Access.READ, Access.READ | Access.WRITE, Access(0)],
        "dataclass": Part("door", 2),
        "namedtuple": Point(1, 2.5),
        "model": _user(),
        "object": Money(12, "EUR"),
        "numpy": [np.float32(0.5), np.int64(-7), np.bool_(1), np.datetime64("2030-01-01")],
        "ndarray": [np.arange(6, dtype="<i2").reshape(2, 3), np.array(["a", "é"])],
        "zebra": "last, and then one that sorts first",
        "aardvark": 1,
    }


@hive.step
async def make_values() -> dict[str, Any]:
    calls.append("make_values")
    return one_of_each()


@hive.step(persona="checker")
async def take_values(given: dict[str, Any], *, strict: bool = True) -> list[str]:
    calls.append("take_values")
    return list(given)


@hive.workflow
async def values(given: dict[str, Any]) -> dict[str, Any]:
    """Pass values of each kind as an argument, an input, a result and a memory."""
    names = await take_values(given)
    made = await make_values()
    return {"names": names, "made": made}


# --- sizes ----------------------------------------------------------------------------------------


def rows(count: int) -> list[dict[str, Any]]:
    """Return rows of about 100 bytes each."""
    return [{"id": n, "text": f"row {n}: " + "it is like the others, " * 3} for n in range(count)]


def digest(value: list[dict[str, Any]]) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@hive.step
def grow(count: int) -> list[dict[str, Any]]:
    """A plain function: it is called in a thread."""
    calls.append(f"grow {count}")
    return rows(count)


@hive.step(store_input=False)
async def measure(given: list[dict[str, Any]]) -> str:
    calls.append(f"measure {len(given)}")
    return digest(given)


@hive.step
async def more(given: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    calls.append(f"more {count}")
    return given + rows(count)


@hive.workflow
async def sizes(counts: list[int], last: int) -> list[Any]:
    """Return digests of values that grow; interrupted in a child, before the last of them."""
    found = [digest(await grow(count)) for count in counts]
    found.append(await measure(await grow(counts[-1])))  # a second, equal call
    given = rows(50)
    for _ in range(3):
        given = await more(given, 10)
    found.extend([await called("sizes"), digest(await grow(last)), digest(given)])
    return found


@hive.step(max_concurrency=1, rate="1000/s", timeout=60, persona="caller")
async def interrupted(name: str) -> str:
    """A step whose process may be stopped or killed here."""
    calls.append(f"interrupted {name}")
    if name in interruptions:
        await interruptions[name]()
    return f"{name} went on"


@hive.workflow
async def called(name: str) -> str:
    """A child that can fail, be cancelled, and be interrupted."""
    if name == "bad":
        raise OutOfStock("bolts", left=0)
    if name == "slow":
        await hive.sleep(3600)
    return await interrupted(name)


# --- steps and branches -----------------------------------------------------------------------------


@dataclass
class Writer:
    """An agent whose identity is how it is encoded."""

    style: str

    @hive.step(persona="writer")
    async def draft(self, topic: str) -> str:
        calls.append(f"draft {topic}")
        return f"{topic} ({self.style}, {secrets.token_hex(4)})"


class Researcher:
    """An agent whose identity is a name that it gives."""

    step_identity = "researcher-1"

    @hive.step
    async def find(self, topic: str) -> str:
        calls.append(f"find {topic}")
        return await number(topic) + " found"  # a step inside of a step


@hive.step
async def number(topic: str) -> str:
    calls.append(f"number {topic}")
    return f"{topic} {secrets.token_hex(4)}"


@hive.step(persona="writer", max_attempts=3)
async def write(topic: str) -> dict[str, Any]:
    """Fail once; remember, save progress and spend something at each attempt."""
    step = current()
    calls.append(f"write {topic}")
    step.spend(tokens=120, usd=0.25)
    step.memory[topic] = (step.attempt, Colour.RED)
    step.history.append({"topic": topic, "attempt": step.attempt})
    step.save_progress(pages=step.attempt, part=Part(topic))
    if step.attempt == 1:
        raise TimeoutError("too slow")
    return {"topic": topic, "progress": step.progress, "history": list(step.history)}


@hive.step(persona="writer")
async def count_slowly(until: int) -> list[int]:
    """Go on where an interrupted attempt stopped."""
    step = current()
    calls.append("count_slowly")
    for count in range(step.progress.get("counted", 0), until):
        step.save_progress(counted=count + 1)
        step.memory["counted"] = count + 1
        if count == 2 and "count" in interruptions:
            await interruptions["count"]()
    return list(range(step.memory["counted"]))


@hive.step(key="invoice-{number}", ignore=("client",))
async def send(number: int, client: object) -> str:
    calls.append(f"send {number}")
    return f"invoice {number} sent"


@hive.step
async def wait_long(name: str) -> str:
    calls.append(f"wait_long {name}")
    await asyncio.sleep(3600)
    return name


@hive.step
async def finish_anyway() -> str:
    """Return a result though it is cancelled."""
    calls.append("finish_anyway")
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        return "finished anyway"
    return "never"


@hive.step
async def note(what: str, seen: Any) -> str:
    """A step whose input is what the workflow saw: called again, if it is something else now."""
    calls.append(f"note {what}")
    return f"{what}: {len(seen)}"


async def _branch(name: str) -> tuple[str, str]:
    if name == "b":
        await hive.sleep(0.01)
    return name, await number("equal")


async def _race() -> list[str]:
    tasks = [asyncio.create_task(each) for each in (wait_long("loser"), number("winner"))]
    done, pending = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    for task in pending:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return [task.result() for task in done]


async def _limited() -> list[str]:
    seen = []
    try:
        async with hive.timeout(0.01):
            await hive.sleep(3600)
    except TimeoutError:
        seen.append("hive.timeout")
    try:
        async with asyncio.timeout(0.01):
            await wait_long("limited")
    except TimeoutError:
        seen.append("asyncio.timeout")
    async with asyncio.timeout(0.01):
        seen.append(await finish_anyway())
    async with hive.timeout(3600):
        await hive.sleep(0.001)
    return seen


@hive.workflow
async def work(topic: str = "bees", *, until: int = 5) -> dict[str, Any]:
    """Branches, a race, timeouts, recorded values, memory; interrupted in a step, near the end."""
    written = await write(topic)
    history = written["history"]
    seen = {
        "written": written,
        "drafts": [await Writer("short").draft(topic), await Researcher().find(topic)],
        "branches": await asyncio.gather(_branch("a"), _branch("b"), _branch("c")),
        "race": await _race(),
        "limits": await _limited(),
        "values": (hive.now(), hive.random(), hive.uuid(), hive.random()),
    }
    noted = await note("work", seen)
    sent = [await send(7, object()), await send(7, object())]
    try:
        counted = await count_slowly(until)
    finally:
        ended = await note("end", [topic])
    return {"noted": noted, "sent": sent, "counted": counted, "ended": ended, "history": history}


# --- errors -----------------------------------------------------------------------------------------


class OutOfStock(Exception):  # noqa: N818 - as users name them
    """An error of a user's own, whose constructor takes other arguments than it stores."""

    def __init__(self, item: str, *, left: int) -> None:
        super().__init__(f"only {left} of {item}")
        self.item = item
        self.left = left


class Refused(Exception):  # noqa: N818 - as above
    """An error with a registered codec."""


register_codec(Refused, encode=str, decode=Refused, name="golden-error")


def _error(kind: str) -> Exception:
    class Local(Exception):  # noqa: N818 - as above
        """It is not found again: a stand-in is raised."""

    made: dict[str, Exception] = {
        "own": OutOfStock("bolts", left=2),
        "registered": Refused("no"),
        "group": ExceptionGroup("both", [ValueError("a"), OutOfStock("nuts", left=1)]),
        "system": FileNotFoundError(2, "No such file or directory", "a/b"),
        "local": Local("not found"),
        "implicit": ValueError("while another one was handled"),
    }
    error = made[kind]
    if kind == "implicit":
        error.__context__ = KeyError(kind)
    else:
        error.__cause__ = KeyError(kind)
    error.add_note(f"a note about {kind}")
    return error


@hive.step(max_attempts=3, rounds=2)
async def fail(kind: str) -> None:
    calls.append(f"fail {kind}")
    raise _error(kind)


@hive.step(retry_on=())
async def fail_at_once(kind: str) -> None:
    calls.append(f"fail_at_once {kind}")
    raise _error(kind)


@hive.step(budget=1000, persona="spender")
async def overspend() -> None:
    calls.append("overspend")
    current().spend(tokens=1001)


def _shown(error: BaseException) -> list[Any]:
    failure = failure_of(error)
    return [
        type(error).__name__,
        str(error),
        [getattr(error, name, None) for name in ("item", "left", "errno", "filename")],
        [str(part) for part in getattr(error, "exceptions", ())],
        type(error.__cause__ or error.__context__).__name__,
        [each for each in getattr(error, "__notes__", ()) if each.startswith("a note")],
        None if failure is None else (len(failure.attempts), failure.rounds),
    ]


async def _caught(step: Awaitable[None]) -> list[Any]:
    try:
        await step
    except Exception as error:  # noqa: BLE001 - of each kind
        return _shown(error)
    return []


@hive.workflow
async def errors() -> list[list[Any]]:
    """Catch errors of each kind, then be interrupted."""
    found = [await _caught(fail("own"))]
    found += [
        await _caught(fail_at_once(kind))
        for kind in ("own", "registered", "group", "system", "local", "implicit")
    ]
    found += [await _caught(overspend()), await _caught(overspend())]
    await interrupted("errors")
    return found


# --- a step that asks whether it had its effect -----------------------------------------------------


@hive.step(on_ambiguous="ask")
async def pay(name: str) -> Part:
    calls.append(f"pay {name}")
    if name in interruptions:
        await interruptions[name]()
    return Part(name)


@hive.workflow
async def bought(name: str, count: int = 1) -> list[Part]:
    """Pay, and be stopped while that is done."""
    return [await pay(name)] * count


# --- children, questions, cancellation ------------------------------------------------------------


@hive.workflow
async def family() -> list[Any]:
    """Children of each end."""
    found: list[Any] = [await called("good")]
    try:
        await called("bad")
    except RunFailedError as error:
        found.append(_shown(error.__cause__ or error))
    slow = asyncio.create_task(called("slow"))
    await hive.sleep(0.02)
    slow.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await slow
    return [*found, slow.cancelled()]


@hive.workflow
async def ask(topic: str) -> dict[str, Any]:
    """Questions: answered, too late, withdrawn by the workflow, and open."""
    colour = await hive.wait_for("colour", type=Colour, about={"topic": topic, "part": Part("a")})
    late = None
    try:
        await hive.wait_for("nobody", timeout=0.01)
    except TimeoutError as error:
        late = str(error)[:27]
    asked = asyncio.create_task(hive.wait_for("dropped"))
    await hive.sleep(0.001)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    noted = await note("ask", [colour, topic])
    sure = await hive.wait_for("approve", type=bool, timeout=_CENTURY, about=Point(1))
    return {"colour": colour, "late": late, "noted": noted, "sure": sure}


@hive.workflow
async def tidied(name: str) -> None:
    """Clean up when it is cancelled."""
    try:
        await asyncio.gather(wait_long(name), called("slow"))
    finally:
        await note("tidied", [name])
        await interrupted(f"tidied {name}")


@hive.step(max_attempts=4, rounds=2, breaker="printer", persona="releaser")
async def release(name: str) -> str:
    calls.append(f"release {name}")
    if name in down:
        raise OutOfStock(name, left=0)
    return f"{name} released"


@hive.step(breaker="provider")
async def refuse(name: str) -> str:
    calls.append(f"refuse {name}")
    return f"{name} was let through"


@hive.workflow
async def released(name: str) -> str:
    """Fail while something is down, or be refused by a breaker."""
    await note("released", [name])
    return await (refuse(name) if name == "refused" else release(name))


@hive.step(max_attempts=1, escalate=True)
async def ship(name: str) -> Part:
    calls.append(f"ship {name}")
    if name in down or not any("mirror" in each for each in current().feedback):
        raise OutOfStock(name, left=0)
    return Part(name)


@hive.workflow
async def shipped(name: str) -> Part:
    """Wait for a person when it fails."""
    return await ship(name)


# --- changed code ---------------------------------------------------------------------------------


@before.step(name="translate")
async def _translate_before(text: str) -> str:
    calls.append("translate, before")
    return text.upper()


@before.step(name="removed")
async def _removed() -> None:
    calls.append("removed")


@before.workflow(name="changed")
async def changed_before() -> list[str]:
    await _removed()
    found = [await _translate_before("a")]
    await interrupted("changed")
    return found


@hive.step
async def translate(text: str, language: str = "en") -> str:
    calls.append(f"translate {text}")
    return f"{text.upper()} ({language})"


@hive.workflow
async def changed() -> list[str]:
    """As it is after the change: an argument, a call more, and a step less."""
    found = [await translate("a"), await translate("b")]
    await interrupted("changed")
    return found


# --- streams ----------------------------------------------------------------------------------------


@hive.step
async def narrate(text: str) -> int:
    calls.append(f"narrate {text}")
    step = current()
    for word in text.split():
        step.write(f"{word} ")
        step.write(word.encode())
    if step.attempt == 1:
        raise ConnectionError("try again")
    return step.attempt


@hive.workflow
async def streamed(text: str) -> int:
    """Write to a stream in two attempts, and in a step that is interrupted."""
    attempts = await narrate(text)
    await interrupted("streamed")
    return attempts


# --- budgets ----------------------------------------------------------------------------------------


@hive.step(persona="spender", max_tokens=40)
async def charge(number: int) -> dict[str, Any]:
    calls.append(f"charge {number}")
    if "charge" in interruptions:
        current().spend(tokens=15, usd=0.001, model="golden-1")
        await interruptions["charge"]()
    usage = {"input_tokens": 30, "output_tokens": 10, "cache_read_input_tokens": 5}
    return {"number": number, "model": "golden-1", "usage": usage}


@hive.workflow
async def paid(count: int) -> int:
    """Spend 40 tokens in each step."""
    return sum([(await charge(number))["number"] for number in range(count)])


# --- tasks of executors -----------------------------------------------------------------------------


async def builds(part: Part) -> dict[str, Any]:
    calls.append("builds")
    step = current()
    step.spend(tokens=10, usd=0.5)
    step.memory["parts"] = [part]
    step.history.append(part.name)
    step.save_progress(current_step=step.attempt)
    if step.attempt == 1:
        raise ConnectionError("try again")
    return {"built": part}


def takes_anything(thing: object, number: int) -> int:
    calls.append("takes_anything")
    return number + 1


async def never_works(number: int) -> None:
    calls.append(f"never_works {number}")
    raise ValueError(f"no way {number}")
