"""Run documents whose content is wrong, under a valid digest: our errors, and no others."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import DocumentCorruptError, MaestroError
from maestro_hive.maestro.state import run_document
from maestro_hive.maestro.state.codec import encode
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.run_document import CopiedEntries, RunText, read_run
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 70, 1.5, "", "x", "00", [], ["x"], [[1, 2]], {}, {"x": 1}),
    {"$": "nothing"},
    [[0, 1 << 40]],
    "f" * 64,
)


def _facts(**facts: Any) -> bytes:
    return encode(facts).data


def _entries() -> list[NewEntry]:
    grown = [{"message": "hello " * 50, "number": number} for number in range(40)]
    step, wait = b"s" * 32, b"w" * 32
    error = {"type": "E", "message": "m", "category": "c", "traceback": "t", "recoverable": True}
    return [
        NewEntry(
            EntryKind.RUN_STARTED,
            facts=_facts(workflow="w", parameters=[]),
            value=encode({"args": [], "kwargs": {}}),
            identity=b"r" * 32,
        ),
        NewEntry(EntryKind.ATTEMPT_STARTED, 1, 1, _facts(name="a", persona="p"), identity=step),
        NewEntry(EntryKind.ATTEMPT_FAILED, 1, 1, _facts(error=error, reason="error")),
        NewEntry(EntryKind.ATTEMPT_STARTED, 1, 2, _facts(name="a", persona="p"), identity=step),
        NewEntry(EntryKind.PROGRESS_SAVED, 1, 2, None, encode({"half": 1})),
        NewEntry(EntryKind.STEP_COMPLETED, 1, 2, None, encode(grown[:30]), "p/a"),
        NewEntry(
            EntryKind.MEMORY_SAVED, 1, 2, _facts(persona="p"), encode({"log": grown[:35]}), "p/a"
        ),
        NewEntry(EntryKind.HISTORY_APPENDED, 1, 2, _facts(persona="p"), encode(grown), "p/a"),
        NewEntry(EntryKind.SPENT, 1, 2, _facts(persona="p", tokens=3, usd=0.5)),
        NewEntry(EntryKind.FIELDS_SET, value=encode({"phase": "one", "step": 2})),
        NewEntry(EntryKind.TASK_PENDING, facts=_facts(task="t")),
        NewEntry(EntryKind.TASK_COMPLETED, facts=_facts(task="t"), value=encode({"file": 1})),
        NewEntry(
            EntryKind.WAIT_STARTED, facts=_facts(name="q", what="answer", shape={}), identity=wait
        ),
        NewEntry(EntryKind.WAIT_ENDED, facts=_facts(name="q", how="answered"), identity=wait),
        NewEntry(EntryKind.RUN_ENDED, facts=_facts(status="success"), value=encode("done")),
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store = SqliteStore(tmp_path_factory.mktemp("run") / "state")
    lease = store.acquire_run("run-1", "w")
    for entry in _entries():
        store.append([Append(lease, [entry])])
    entries = store.entries(lease.run)
    text = RunText(store, lease.run, "run-1", 0, len(entries), {"phase": "one"}, "2030-01-01", 3)
    sealed = run_document.seal("execution_state", {}, {"run": text})
    store.close()
    members: dict[str, Any] = run_document.unseal(sealed, "execution_state", "it")["run"]
    assert any("pieces" in value for value in members["values"].values())
    return members


def read(run: dict[str, Any]) -> list[NewEntry]:
    text = run_document.seal("execution_state", {"run": run})
    body = run_document.unseal(text, "execution_state", "it")
    return list(CopiedEntries(read_run("it", body["run"])))


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    members = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in list(members):
        yield node, key
        if isinstance(child, dict | list):
            yield from _places(child)


def test_a_run_comes_back(run: dict[str, Any]) -> None:
    entries = read(run)
    assert [entry.kind for entry in entries[1:]] == [entry.kind for entry in _entries()]
    assert [entry.value for entry in entries[1:]] == [entry.value for entry in _entries()]


def test_whatever_is_wrong_with_a_run_is_an_error_of_ours(run: dict[str, Any]) -> None:
    count, text = len(list(_places(run))), json.dumps(run)
    chance = random.Random(1)
    for number in range(count):
        for wrong in chance.sample(WRONG, 4):
            changed = json.loads(text)
            node, key = list(_places(changed))[number]
            node[key] = wrong
            with contextlib.suppress(MaestroError):
                read(changed)


def test_whatever_is_missing_from_a_run_is_an_error_of_ours(run: dict[str, Any]) -> None:
    for number in range(len(list(_places(run)))):
        changed = copy.deepcopy(run)
        node, key = list(_places(changed))[number]
        del node[key]
        with contextlib.suppress(MaestroError):
            read(changed)


@pytest.mark.parametrize("base", ["itself", "missing", "a circle"])
def test_a_value_that_builds_on_nothing_is_refused(run: dict[str, Any], base: str) -> None:
    changed = json.loads(json.dumps(run))
    values = changed["values"]
    digests = [digest for digest, value in values.items() if "pieces" in value]
    values[digests[0]]["base"] = {
        "itself": digests[0],
        "missing": "0" * 64,
        "a circle": digests[-1],
    }[base]
    values[digests[-1]]["base"] = digests[0]
    with pytest.raises(DocumentCorruptError):
        read(changed)


def test_long_fields_are_written_in_parts(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state")
    lease = store.acquire_run("run-1")
    fields: dict[str, Any] = {
        "names": [f"name {number}" for number in range(1234)],
        "counts": {f"key {number}": [number] for number in range(1001)},
        "tagged": {number: str(number) for number in range(600)},
        "dollar": {"$": 1, **{str(number): number for number in range(600)}},
        "few": [1, {"a": (1, 2)}],
        "none": [],
    }
    text = RunText(store, lease.run, "run-1", 0, 0, fields, "2030", 1)
    assert max(map(len, text)) < 20_000
    state = json.loads(b"".join(text))["state"]
    assert state == {name: json.loads(encode(value).data) for name, value in fields.items()}
    store.close()
