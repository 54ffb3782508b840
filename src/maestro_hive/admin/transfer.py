"""Copies to take elsewhere: a whole state folder, made while it is in use, and a run as one file.

A run is exported with its values, and imported into another folder, as the document that is next to a
journal as ``execution_state.json``, with the same checksum. To be read elsewhere it is exported without
its secrets: as a document of another kind, which nothing is resumed from.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from maestro_hive.admin.folder import (
    checkpoint_folders,
    documents,
    reading,
    separate_checkpoint_folders,
    writing,
)
from maestro_hive.admin.runs import find_run
from maestro_hive.engine import audit
from maestro_hive.engine.copies import FILE, KIND, document_of
from maestro_hive.engine.open_run import append_entries
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    AtomicWriteError,
    ConfigurationError,
    DocumentCorruptError,
    FolderError,
    StorageError,
)
from maestro_hive.kernel.redaction import REDACTED, redact_text, redact_value
from maestro_hive.maestro.state import codec, run_document
from maestro_hive.maestro.state.json_stream import BytesSource
from maestro_hive.maestro.state.projections import facts_of, fold
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.run_document import CopiedEntries, read_run
from maestro_hive.maestro.state.views import is_redacted, plain_values, show_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from maestro_hive.maestro.state.json_stream import Source
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.run_document import RunCopy, RunText
    from maestro_hive.maestro.state.store import Reader, Store

_LIMIT = run_document.MAX_DOCUMENT_BYTES
#: The kind of an export whose secrets are replaced, and how the text of one starts: its members are in
#: alphabetical order.
REDACTED_KIND = "redacted_run"
_REDACTED_HEAD = b'{"document":{"format":%d,"kind":"%s",' % (
    run_document.DOCUMENT_FORMAT,
    REDACTED_KIND.encode(),
)
#: How many bytes of stdin are read at a time.
_SPOOLED_BYTES = 1 << 20

# --- backup ---------------------------------------------------------------------------------------


def back_up(folder: Path, target: Path) -> int:
    """Copy a state folder to a new folder, and return how many files it has.

    The journal is copied as of one moment, and all documents.
    Until the copy is complete it is in a folder ".NAME.half" next to the target, or ".half" in a
    target that exists and is empty. What a killed backup left there is deleted by the next one.
    """
    with writing(folder) as store, _unfinished(target) as half:
        store.backup(half)
        copied = 1 + sum(
            _copy_document(source, half, place) for source, place in _documents(folder)
        )
        copied += _copy_audit_logs(folder, half)
        _put_in_place(half, target)
    return copied


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Make the folder of an unfinished copy, on the target's disk; an error deletes it.

    It is locked meanwhile, so the content of one that is not locked was left by a killed process.
    """
    target = target.resolve()
    half = target / ".half" if target.is_dir() else target.with_name(f".{target.name}.half")
    if os.path.lexists(target) and not target.is_dir():
        raise FolderError(target, "is not a folder")
    if target.is_dir() and any(path != half for path in target.iterdir()):
        raise StorageError(f"{target} exists and is not empty; choose a new folder")
    files.make_folder_inside(half.parent, half.name)
    with files.opened(half, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as lock:
        if not _is_locked_by(lock, half):
            raise StorageError(f"another process is making the backup {target} now")
        try:
            _empty(half)
            yield half
        except BaseException:  # Ctrl+C too must not leave an unfinished copy
            shutil.rmtree(half, ignore_errors=True)
            raise


def _is_locked_by(lock: int, half: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(half.stat(), os.fstat(lock))  # or it was renamed already
    except (BlockingIOError, FileNotFoundError):
        return False


def _empty(half: Path) -> None:
    with files.explained(lambda reason: StorageError(f"{half} could not be emptied: {reason}")):
        for path in half.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _put_in_place(half: Path, target: Path) -> None:
    """Rename a complete copy, durably; the journal last, which makes it a state folder."""
    target = target.resolve()
    problem = f"{target} could not be put in place"
    with files.explained(lambda reason: StorageError(f"{problem}: {reason}")):
        if half.parent == target:
            for path in sorted(half.iterdir(), key=lambda path: path.name == "journal.db"):
                files.sync_folder(target)
                path.rename(target / path.name)
            half.rmdir()
        else:
            half.rename(target)
        files.sync_folder(half.parent)


def _documents(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the documents next to the journal, and their places in a copy."""
    for path, _ in documents(folder):
        yield path, path.relative_to(folder)
    for separate in separate_checkpoint_folders(folder):  # the copy has them inside
        for path in sorted(separate.glob("*/*.json")):
            yield path, Path("checkpoints") / path.relative_to(separate)


def _copy_document(source: Path, target: Path, place: Path) -> int:
    try:
        file = files.open_file(source, _LIMIT)
    except FileNotFoundError:
        return 0  # retention deleted it just now
    inside = files.make_folder_inside(target, *place.parent.parts)
    files.write_atomically(inside / place.name, file.chunks())
    return 1


def _copy_audit_logs(folder: Path, target: Path) -> int:
    """Copy the audit logs inside a state folder, as far as the copied journal knows them."""
    with reading(target) as reader:
        anchors = audit.ANCHORS.all(reader)
    copied = 0
    for name, anchor in anchors.items():
        place = Path(name)
        if not place.is_absolute() and (folder / place).exists():
            inside = files.make_folder_inside(target, *place.parent.parts)
            audit.copy_log(folder / place, inside / place.name, anchor.number)
            copied += 1
    return copied


# --- export ---------------------------------------------------------------------------------------


class ExportedRun:
    """A run as the text of a file, how many steps and children it has, and chunks left out."""

    def __init__(
        self, run_id: str, file: files.ReadFile, state: RunState, chunks_left_out: int
    ) -> None:
        self.run_id = run_id
        self.size = file.size
        self.steps, self.children = len(state.steps), len(state.children)
        #: How many chunks its streams have: they are no part of the file.
        self.chunks_left_out = chunks_left_out
        self._file = file

    def chunks(self) -> Iterator[bytes]:
        """Yield the text in parts."""
        return self._file.chunks()

    @property
    def text(self) -> bytes:
        """The whole text."""
        return b"".join(self.chunks())


def export_run(
    reader: Reader, run_id: str, scratch: Path | None = None, *, with_values: bool
) -> ExportedRun:
    """Return a run as of now, as the text of a file; it may be executed meanwhile.

    The text is in a temporary file of the folder ``scratch``. ``with_values`` it was read again, and
    can be imported; else secrets are replaced in it, and it cannot.
    """
    record = find_run(reader, run_id)
    document, state = _document(reader, record)
    problem = (
        f"run {run_id!r} was not written to a temporary file in {scratch or tempfile.gettempdir()}"
    )
    with (
        files.explained(lambda reason: StorageError(f"{problem}: {reason}")),
        tempfile.TemporaryFile(dir=scratch) as file,
    ):
        if with_values:
            chunks = run_document.seal_in_chunks(KIND, {}, raw={"run": document})
        else:
            raw = {"run": _redacted(document, state)}
            chunks = run_document.seal_in_chunks(REDACTED_KIND, {"redacted": True}, raw=raw)
        file.writelines(chunks)
        file.flush()
        written = _read_file(file, f"the file of run {run_id!r}")
    if with_values:
        read_export(written, written.name)
    return ExportedRun(run_id, written, state, reader.last_chunk(record.id))


def _document(reader: Reader, record: RunRecord) -> tuple[RunText, RunState]:
    lease = reader.lease(f"run/{record.name}")
    load = plain_values(reader.load)
    state = fold(reader.entries(record.id), load)
    shown = show_fields(state, load)
    if state.started is None:
        shown["status"] = record.status
    fence = state.fence_floor + (lease.fence if lease is not None else 0)
    return document_of(reader, record.id, state, record.name, fence, shown), state


def _redacted(document: RunText, state: RunState) -> Iterator[bytes]:
    """Yield a run as JSON text in which secrets are replaced, each value where it was recorded.

    It has no digests of values: a short secret could be guessed from one.
    """
    hidden = {number for number, step in state.steps.items() if is_redacted(step)}
    yield b'{"entries":['
    for number, entry in enumerate(document.entries()):
        shown = _redacted_entry(document.store, entry, hides=entry.step in hidden)
        yield (b"," if number else b"") + codec.dump(shown)
    rest = {
        "saved_at": document.saved_at,
        "seq": document.seq,
        "state": {name: redact_value(codec.parse(text)) for name, text in document.state.items()},
        "workflow_id": redact_text(document.name),
    }
    yield b"]," + codec.dump(rest)[1:]


def _redacted_entry(reader: Reader, entry: Entry, *, hides: bool) -> dict[str, object]:
    shown: dict[str, object] = {
        "at": entry.at,
        "attempt": entry.attempt,
        "facts": redact_value(facts_of(entry)),
        "kind": EntryKind(entry.kind).name.lower(),
        "seq": entry.seq,
        "step": entry.step,
    }
    value = reader.load(entry)
    if hides and entry.kind == EntryKind.STEP_COMPLETED:
        shown["value"] = REDACTED
    elif value is not None:
        shown["value"] = redact_value(codec.parse(value, depth=codec.DOCUMENT_DEPTH))
    return shown


def write_copy(store: Store, folder: Path, run_id: str) -> None:
    """Write the ``execution_state.json`` of a run whose lease this process has."""
    record = store.run(run_id)
    if record is not None:
        inside = files.make_folder_inside(folder, "runs", run_id)
        document, _ = _document(store, record)
        chunks = run_document.seal_in_chunks(KIND, {}, raw={"run": document})
        files.write_atomically(inside / FILE, chunks)


def check_target(target: Path, *, force: bool) -> None:
    """Raise if something is there that must not be replaced; only regular files ever are."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "is a symbolic link" if stat.S_ISLNK(mode) else "is not a regular file"
        raise ConfigurationError(
            f"{target} {what}, and is not replaced. Choose another file, or - for stdout."
        )
    if not force:
        raise _exists_already(target)


def write_export(target: Path, text: Iterable[bytes], *, force: bool) -> None:
    """Write a file, given in chunks; without ``force`` only if there is none, also none made meanwhile."""
    check_target(target, force=force)
    if force:
        files.write_atomically(target.absolute(), text)
        return
    with files.explained(lambda reason: AtomicWriteError(target, reason)):
        try:
            target.touch(mode=0o600, exist_ok=False)  # from now on no other process can create it
        except FileExistsError:
            raise _exists_already(target) from None
    try:
        files.write_atomically(target.absolute(), text)
    except BaseException:
        with contextlib.suppress(OSError):
            if not target.lstat().st_size:
                target.unlink()
        raise


def _exists_already(target: Path) -> ConfigurationError:
    return ConfigurationError(f"{target} exists already. Choose another file, or use --force.")


# --- import ---------------------------------------------------------------------------------------


def read_export(text: bytes | Source, name: str) -> RunCopy:
    """Return the run in a file; raise if the file is damaged, redacted, or of a newer version."""
    source = BytesSource(text, name) if isinstance(text, bytes) else text
    if source.read_at(0, len(_REDACTED_HEAD)) == _REDACTED_HEAD:
        raise ConfigurationError(
            f"{name} is a redacted export: its secrets were replaced by {REDACTED}, so its run cannot be"
            " resumed. Export the run again with --with-values, and import that file."
        )
    body = run_document.unseal(text, KIND, name, lazy=True)
    run = body.get("run")
    if not isinstance(run, dict):
        raise DocumentCorruptError(name, "there is no run in it")
    return read_run(name, run, plain=True)


def spool(stream: BinaryIO, name: str) -> files.ReadFile:
    """Return what comes from a stream, such as stdin, as a file: it is read more than once."""
    problem = f"{name} could not be written to a temporary file"
    with (
        files.explained(lambda reason: StorageError(f"{problem}: {reason}")),
        tempfile.TemporaryFile() as file,
    ):
        while (chunk := stream.read(_SPOOLED_BYTES)) and file.tell() <= _LIMIT:  # or it is refused
            file.write(chunk)
        file.flush()
        return _read_file(file, name)


def _read_file(file: IO[bytes], name: str) -> files.ReadFile:
    """Return a temporary file, to be read; it is gone when nobody refers to it any more."""
    size = os.fstat(file.fileno()).st_size
    return files.ReadFile(os.dup(file.fileno()), name, size)


def import_run(
    folder: Path, text: bytes | Source, name: str, *, run_id: str | None = None
) -> tuple[str, str]:
    """Add the run in a file to a state folder, completely or not at all.

    The file is checked before the folder is touched; ``name`` names it in errors. Return the run's
    id, and the time at which it was saved.
    """
    copy = read_export(text, name)
    new_id = copy.run_id if run_id is None else run_id
    with writing(folder, create=True) as store:
        files.check_identifier(new_id, "run id")
        _refuse_existing(store, new_id, folder)
        _add(store, copy, new_id)
    return new_id, copy.saved_at


def _add(store: Store, copy: RunCopy, run_id: str) -> None:
    """Create the run with all its entries, in one transaction: a kill leaves all of it, or nothing."""
    entries = CopiedEntries(copy, journal_lost=True)
    run = store.acquire_run(
        run_id, copy.workflow, entries, copy.status, parent=copy.parent, budget=copy.budget
    )
    try:
        if not run.created:  # another process started it just now
            raise _is_taken(run_id, store.location)
        append_entries(store, run, ())  # returns when it would survive a power cut
    finally:
        store.release_run(run)


def _refuse_existing(store: Store, run_id: str, folder: Path) -> None:
    _purge_empty(store, run_id)
    if store.run(run_id) is not None:
        raise _is_taken(run_id, store.location)
    for place in (folder / "runs", *checkpoint_folders(folder)):
        try:
            is_there = (place / run_id).exists()
        except OSError as error:
            raise FolderError(place, f"cannot be read ({error.strerror})") from error
        if is_there:
            raise _is_taken(run_id, str(place / run_id))


def _is_taken(run_id: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is a run {run_id!r} already, in {where}; import this one under another id with"
        f" --as, or purge that one first: 'maestro purge {run_id}'"
    )


def _purge_empty(store: Store, run_id: str) -> None:
    """Purge a run that has no entries: of a first start that was killed."""
    record = store.run(run_id)
    if record is not None and not store.entries(record.id):
        store.purge_runs([run_id])
