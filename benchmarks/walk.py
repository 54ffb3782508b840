"""Count what one step calls: ``python -m benchmarks.walk``.

Counted are the calls of functions that are defined in ``src/maestro_hive``, in all threads, between
the call of a step in a workflow and its return. A generator or a coroutine counts once, however
often it is resumed; a comprehension counts where Python makes a function of it (before 3.12); the
bodies of modules and classes do not count. The step has no options and scalar values, and another
run came before, so that nothing is imported late. What our background threads do meanwhile is
counted, too, so that the fewest calls of a few processes are shown.

How often the input is encoded and hashed is seen by what ``json``, ``orjson`` and ``hashlib`` are
given: a text that occurs nowhere else.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

_ROOT = Path(__file__).resolve().parent.parent
_SOURCE = str(_ROOT / "src" / "maestro_hive") + os.sep
#: The input of the step that is counted; its result does not contain it.
_MARK = "a-text-that-occurs-nowhere-else"
_RUN = "walk"
_EXECUTE, _REPLAY = "execute", "replay"
_WARM_UP = "warm-up"
_TIMES = 3
#: After this long nothing of an earlier run is done in the background.
_QUIET_SECONDS = 0.3
#: After this long a thread that is told of a new run waits again, and its copies are not yet due.
_STARTED_SECONDS = 0.02
_RESUMABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class _Target(NamedTuple):
    calls: int
    modules: int | None = None


#: What is counted, and how much it shall be at most.
_TARGETS = {
    "the first step of a run": _Target(150, 20),
    "a later step": _Target(150, 20),
    "the first step of a run on replay": _Target(40),
    "a later step on replay": _Target(40),
}
#: How often the input shall be encoded, and how often hashed.
_INPUT_WALKS = 1


class Counted(TypedDict):
    """What one step called."""

    calls: dict[str, int]
    changes: int
    encoded: int
    hashed: int
    seen: dict[str, int]


class _Recorder:
    """The calls of our functions while it is on, in all threads that began after ``install``."""

    def __init__(self) -> None:
        self.on = False
        #: Coroutines and generators that were started, so that their resumptions do not count.
        self._started: dict[int, FrameType] = {}
        self._forget()

    def _forget(self) -> None:
        self._encoded = 0
        self._hashed = 0
        self._codes: list[CodeType] = []
        self._seen: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin to count."""
        self._forget()
        self.on = True

    def end(self) -> Counted:
        """Stop counting, and return what was seen."""
        self.on = False
        modules = [_module_of(code) for code in self._codes]
        return {
            "calls": dict(Counter(_name_of(code) for code in self._codes)),
            "changes": sum(one != two for one, two in itertools.pairwise(modules)),
            "encoded": self._encoded,
            "hashed": self._hashed,
            "seen": dict(self._seen),
        }

    def install(self) -> None:
        """Watch calls, and what encoders and hashes are given; before anything of ours is imported."""
        self._watch_encoders()
        self._watch_hashes()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_SOURCE) or not _is_function(code):
            return
        if code.co_flags & _RESUMABLE:
            if id(frame) in self._started:
                return
            self._started[id(frame)] = frame  # kept, so that no two have the same id
        if not self.on:
            return
        self._codes.append(code)
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(_is_mark(frame.f_locals.get(name)) for name in given):
            self._seen[_name_of(code)] += 1

    def _watch_encoders(self) -> None:
        make: Callable[..., Callable[..., Any]] | None
        make = getattr(json.encoder, "c_make_encoder", None)
        if make is not None:

            def watched(*settings: Any) -> Callable[..., Any]:
                encode = make(*settings)
                return lambda tree, level: self._note_text(encode(tree, level))

            vars(json.encoder)["c_make_encoder"] = watched
        if importlib.util.find_spec("orjson") is not None:
            orjson = importlib.import_module("orjson")
            dumps = orjson.dumps
            vars(orjson)["dumps"] = lambda *given, **options: self._note_data(
                dumps(*given, **options)
            )

    def _note_text(self, pieces: Iterable[str]) -> tuple[str, ...]:
        kept = tuple(pieces)
        self._encoded += self.on and any(_MARK in piece for piece in kept)
        return kept

    def _note_data(self, data: bytes) -> bytes:
        self._encoded += self.on and _MARK.encode() in data
        return data

    def _watch_hashes(self) -> None:
        for name in ("sha256", "sha1", "md5", "blake2b", "blake2s", "sha3_256"):
            make = getattr(hashlib, name)
            vars(hashlib)[name] = lambda data=b"", *, make=make, **options: _Hash(
                self, make(**options), data
            )

    def note_hashed(self, data: Any) -> None:
        """Note that something was hashed."""
        self._hashed += self.on and _MARK.encode() in bytes(data)


class _Hash:
    """A hash that tells the recorder what it is given."""

    def __init__(self, recorder: _Recorder, real: Any, data: Any = b"") -> None:
        self._recorder = recorder
        self._real = real
        self.update(data)

    def update(self, data: Any) -> None:
        self._recorder.note_hashed(data)
        self._real.update(data)

    def copy(self) -> _Hash:
        return _Hash(self._recorder, self._real.copy())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _is_function(code: CodeType) -> bool:
    """Return whether code is that of a function, not the body of a module or a class."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _is_mark(value: object) -> bool:
    return type(value) is str and value == _MARK


def _module_of(code: CodeType) -> str:
    return code.co_filename.removeprefix(_SOURCE).removesuffix(".py").replace(os.sep, ".")


def _name_of(code: CodeType) -> str:
    return f"{_module_of(code)}:{code.co_qualname}"


def _count(part: str, folder: Path) -> None:
    """Execute two steps, or find them completed, in this process; print what was counted."""
    recorder = _Recorder()
    recorder.install()
    from maestro_hive import Hive

    hive = Hive(folder)

    @hive.step(persona="writer")
    async def draft(number: int, title: str) -> int:
        assert title == _WARM_UP or part == _EXECUTE, "a completed step was executed again"
        return number

    @hive.workflow
    async def warm() -> None:
        await draft(0, _WARM_UP)
        await draft(1, _WARM_UP)

    @hive.workflow
    async def run() -> None:
        await asyncio.sleep(_STARTED_SECONDS)
        found = []
        for number in range(2):
            recorder.begin()
            returned = await draft(number, _MARK)
            found.append(recorder.end())
            assert returned == number
        print(json.dumps(found), flush=True)
        os._exit(0)  # as if killed: the run is not over, and can be resumed

    async def main() -> None:
        await hive.run(warm)
        await asyncio.sleep(_QUIET_SECONDS)  # until what ends with that run has ended
        await hive.run(run, run_id=_RUN)

    asyncio.run(main())


def _in_a_process(part: str, folder: str) -> list[Counted]:
    command = [sys.executable, "-m", "benchmarks.walk", "--part", part, "--folder", folder]
    done = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: list[Counted] = json.loads(done.stdout)
    return found


def walk() -> dict[str, Counted]:
    """Return what the first and the second step of a run call, executed and on replay."""
    with tempfile.TemporaryDirectory() as folder:
        executed, replayed = _in_a_process(_EXECUTE, folder), _in_a_process(_REPLAY, folder)
    return dict(zip(_TARGETS, (*executed, *replayed), strict=True))


def _total(found: Counted) -> int:
    return sum(found["calls"].values())


def _show(what: str, found: Counted, *, functions: bool) -> None:
    modules: Counter[str] = Counter()
    for name, calls in found["calls"].items():
        modules[name.partition(":")[0]] += calls
    print(f"\n{what}, per module ({found['changes']} changes of module):")
    for module, calls in modules.most_common():
        print(f"  {calls:4}  {module}")
        for name, count in found["calls"].items() if functions else ():
            if name.partition(":")[0] == module:
                print(f"          {count:4}  {name.partition(':')[2]}")
    seen = ", ".join(f"{name} {calls}" for name, calls in found["seen"].items())
    print(f"  functions that were handed the value itself: {seen or 'none'}")


def _figures(what: str, found: Counted) -> tuple[tuple[str, int, int | None], ...]:
    targets = _TARGETS[what]
    return (
        ("calls", _total(found), targets.calls),
        ("modules", len(_modules(found)), targets.modules),
        ("input encoded", found["encoded"], _INPUT_WALKS),
        ("input hashed", found["hashed"], _INPUT_WALKS),
    )


def summary(what: str, found: Counted) -> str:
    """Return the figures of a step, each beside what it shall be."""
    figures = _figures(what, found)
    lines = (f"  {name:<16} {count:4}{_verdict(count, target)}" for name, count, target in figures)
    return "\n".join((what, *lines))


def misses(what: str, found: Counted) -> bool:
    """Return whether a figure is not what it shall be."""
    figures = _figures(what, found)
    return any(not count or (target is not None and count > target) for _, count, target in figures)


def _modules(found: Counted) -> set[str]:
    return {name.partition(":")[0] for name in found["calls"]}


def _verdict(count: int, target: int | None) -> str:
    if target is None:
        return ""
    if not count:
        return "   not seen: is there another encoder, or another hash?"
    return f"   <= {target:<4} {'reached' if count <= target else 'NOT REACHED'}"


def main() -> None:
    """Count in fresh processes: steps that are executed, and the same steps completed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("--functions", action="store_true", help="list every function, too")
    parser.add_argument("--part", choices=(_EXECUTE, _REPLAY), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.part:
        _count(words.part, words.folder)
        return
    walks = [walk() for _ in range(_TIMES)]
    fewest = {what: min((walk[what] for walk in walks), key=_total) for what in _TARGETS}
    for what, found in fewest.items():
        print(summary(what, found))
    for what, found in fewest.items():
        _show(what, found, functions=words.functions)


if __name__ == "__main__":
    main()
