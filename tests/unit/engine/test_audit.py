"""The audit log: chained, anchored, and every kind of tampering found."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.admin.transfer import back_up
from maestro_hive.engine import audit
from maestro_hive.engine.audit import ANCHORS, FIRST, Anchor, AuditLog, make_line, verify
from maestro_hive.kernel.appending import AppendedFile
from maestro_hive.kernel.errors import CorruptionError, StorageError
from maestro_hive.maestro.state.stores import close_store, open_reader, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import Store

LINES = 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "state")
    yield opened
    close_store(opened)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "audit.jsonl"


def fill(log: AuditLog, count: int = LINES) -> None:
    for number in range(count):
        log.write({"persona_id": f"p{number}", "allowed": bool(number % 2), "path": "ü\udcff"})


def rewritten(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


def rechained(lines: list[bytes], at: int, **changes: Any) -> list[bytes]:
    """Change a line, and make all hashes from there on right again, as one who knows how would."""
    made = lines[:at]
    after = Anchor(at, json.loads(lines[at - 1])["sha256"] if at else FIRST)
    for number, line in enumerate(lines[at:]):
        facts = json.loads(line)
        for name in ("number", "anchored", "previous", "sha256"):
            del facts[name]
        data, after = make_line(facts | (changes if not number else {}), after, anchored=True)
        made.append(data + b"\n")
    return made


def test_lines_are_numbered_chained_and_anchored(store: Store, path: Path) -> None:
    fill(AuditLog(path, store))
    previous = FIRST
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        facts = json.loads(line)
        assert (facts["number"], facts["previous"]) == (number, previous)
        # As docs/howto/policy.md says, without our code.
        body = line[: -len(f',"sha256":"{facts["sha256"]}"}}')] + b"}"
        previous = hashlib.sha256(body).hexdigest()
        assert facts["sha256"] == previous
        assert facts["path"] == "ü\udcff"
    assert ANCHORS.all(store) == {"audit.jsonl": Anchor(LINES, previous)}
    report = verify(path, store)
    assert (report.is_intact, report.lines, report.anchored, report.notes) == (True, 6, 6, ())
    assert path.stat().st_mode & 0o777 == 0o600


#: What is done to a log of six lines, and the first line that is wrong then.
TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a changed line": (lambda x: [*x[:2], x[2].replace(b"false", b"true "), *x[3:]], 3),
    "a changed line whose length is the same": (lambda x: [x[0].replace(b"p0", b"p9"), *x[1:]], 1),
    "a blank more": (lambda x: [*x[:3], x[3].replace(b":", b": ", 1), *x[4:]], 4),
    "a removed line": (lambda x: [*x[:3], *x[4:]], 4),
    "a removed first line": (lambda x: x[1:], 1),
    "two lines exchanged": (lambda x: [x[0], x[2], x[1], *x[3:]], 2),
    "a line repeated": (lambda x: [*x[:3], x[2], *x[3:]], 4),
    "a foreign line inserted": (lambda x: [*x[:2], b'{"allowed":true}\n', *x[2:]], 3),
    "an empty line inserted": (lambda x: [*x[:2], b"\n", *x[2:]], 3),
    "the last line cut off": (lambda x: x[:-1], 6),
    "the last lines cut off": (lambda x: x[:2], 3),
    "the end of the last line cut off": (lambda x: [*x[:-1], x[-1][:-1]], 6),
    "half of the last line cut off": (lambda x: [*x[:-1], x[-1][:40]], 6),
    "all lines cut off": (lambda x: [], 1),
    "a line rewritten with all hashes after it": (lambda x: rechained(x, 2, allowed=True), 6),
    "the last line rewritten": (lambda x: rechained(x, 5, allowed=False), 6),
    "a rewritten log without its first line": (lambda x: rechained(x[1:], 0), 6),
    "two lines added with right hashes": (lambda x: rechained([*x, x[0], x[1]], 6), 8),
    "half a line after a line added": (lambda x: [*rechained([*x, x[0]], 6), b"{"], 8),
}


@pytest.mark.parametrize("kind", TAMPERING)
def test_every_kind_of_tampering_is_found(store: Store, path: Path, kind: str) -> None:
    change, bad_line = TAMPERING[kind]
    log = AuditLog(path, store)
    fill(log)
    rewritten(path, change)
    report = verify(path, store)
    assert (report.is_intact, report.bad_line) == (False, bad_line), report
    assert report.problem


@pytest.mark.parametrize("kind", [each for each in TAMPERING if TAMPERING[each][1] in (1, 6)])
def test_nothing_is_written_after_a_wrong_end(store: Store, path: Path, kind: str) -> None:
    log = AuditLog(path, store)
    fill(log)
    rewritten(path, TAMPERING[kind][0])
    if TAMPERING[kind][1] == 1 and "all lines" not in kind:
        log.write({})  # only the end of a log is read when it is written to
        assert verify(path, store).bad_line == 1
        return
    before = path.read_bytes()
    with pytest.raises(CorruptionError, match="maestro audit verify"):
        log.write({})
    assert path.read_bytes() == before


def test_a_deleted_log_is_found(store: Store, path: Path) -> None:
    log = AuditLog(path, store)
    fill(log, 2)
    path.unlink()
    report = verify(path, store)
    assert (report.bad_line, report.is_intact) == (1, False)
    assert "deleted" in (report.problem or "")
    with pytest.raises(CorruptionError, match="use another path"):
        log.write({})
    assert path.read_bytes() == b""
    assert verify(path, store).bad_line == 1


def test_the_chain_is_verified_without_a_journal_and_that_is_said(path: Path) -> None:
    log = AuditLog(path)
    fill(log)
    report = verify(path)
    assert (report.is_intact, report.lines, report.anchored) == (True, LINES, None)
    assert "no anchor" in report.notes[0]
    rewritten(path, lambda lines: [*lines[:1], *lines[2:]])
    assert verify(path).bad_line == 2


def test_a_log_that_began_in_memory_is_anchored_from_then_on(store: Store, path: Path) -> None:
    fill(AuditLog(path), 2)
    log = AuditLog(path, store)
    fill(log, 1)
    assert verify(path, store).anchored == 3
    with pytest.raises(StorageError, match="anchored in the journal of a state folder"):
        AuditLog(path).write({})
    assert not verify(path).is_intact, "who verifies must give the journal"


def test_two_journals_do_not_share_a_log(store: Store, path: Path, tmp_path: Path) -> None:
    fill(AuditLog(path, store), 1)
    other = open_store(tmp_path / "other")
    try:
        with pytest.raises(CorruptionError, match="another journal anchors it"):
            AuditLog(path, other).write({})
    finally:
        close_store(other)


@pytest.mark.parametrize("torn", [b"{", b'{"allowed":tr', b'{"a":1}'])
def test_a_line_that_a_kill_cut_off_is_written_over(store: Store, path: Path, torn: bytes) -> None:
    log = AuditLog(path, store)
    fill(log, 2)
    with path.open("ab") as file:
        file.write(torn)
    report = verify(path, store)
    assert report.is_intact
    assert "cut off" in report.notes[0]
    log.write({})
    assert verify(path, store).notes == ()
    assert len(path.read_bytes().splitlines()) == 3


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_line_without_its_anchor_is_anchored_by_the_next(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(path, store)
    fill(log, 2)
    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "_set_anchor", killed)
        with pytest.raises(KeyboardInterrupt):
            log.write({})
    report = verify(path, store)
    assert (report.is_intact, report.lines, report.anchored) == (True, 3, 2)
    assert "not anchored yet" in report.notes[0]
    fill(log, 1)
    assert verify(path, store).anchored == 4


def test_a_failed_write_leaves_nothing_behind(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(path, store)
    fill(log, 2)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("pwrite", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(f"maestro_hive.kernel.appending.os.{name}", fail)
            with pytest.raises(StorageError, match=r"audit log .* cannot be written: .*No space"):
                log.write({})
        assert path.read_bytes() == before
    fill(log, 1)
    assert verify(path, store).lines == 3


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_only_a_regular_file_is_a_log(store: Store, path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(StorageError, match=r"audit log .* cannot be written"):
        AuditLog(path, store).write({})


def test_a_lock_that_is_held_for_too_long_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    fill(AuditLog(path, store), 1)
    monkeypatch.setattr(audit, "PATIENCE", 0.01)
    with AppendedFile(path) as other:
        assert other.try_acquire()
        with pytest.raises(StorageError, match="lock"):
            AuditLog(path, store).write({})


def test_threads_write_one_chain(store: Store, path: Path) -> None:
    writers = [threading.Thread(target=fill, args=(AuditLog(path, store), 5)) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    report = verify(path, store)
    assert (report.is_intact, report.lines, report.anchored) == (True, 30, 30)


def test_long_lines_are_found_from_the_end(store: Store, path: Path) -> None:
    log = AuditLog(path, store)
    for length in (1, 70_000, 200_000, 3):
        log.write({"message": "x" * length})
    assert verify(path, store).lines == 4


def test_a_backup_has_the_log_as_far_as_its_journal_knows_it(
    store: Store, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(path, store)
    fill(log)
    copying = audit.copy_log

    def later(*given: Any) -> None:
        fill(log, 3)  # while the copy is made
        copying(*given)

    monkeypatch.setattr(audit, "copy_log", later)
    back_up(tmp_path / "state", tmp_path / "copy")
    reader = open_reader(tmp_path / "copy")
    report = verify(tmp_path / "copy" / "audit.jsonl", reader)
    reader.close()
    assert (report.is_intact, report.lines, report.anchored) == (True, LINES, LINES)
    assert verify(path, store).lines == LINES + 3
