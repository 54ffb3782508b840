"""Folders and whole files: private, complete or absent, and never somewhere else.

The other parts of ``files`` have test_identifiers.py, test_locks.py and test_shared_folders.py.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    AtomicWriteError,
    DocumentCorruptError,
    FolderError,
    InvalidIdentifierError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AS_ROOT = os.geteuid() == 0


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def identity(path: Path) -> tuple[int, ...]:
    """Return the facts that only a change alters; reading a link alters its atime."""
    facts = path.lstat()
    return facts.st_ino, facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def open_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


# --- folders ---------------------------------------------------------------------------------


def test_every_folder_made_on_the_way_is_private(tmp_path: Path, umask: int) -> None:
    made = files.make_private_folder(tmp_path / "a" / "b" / "c")
    assert made == tmp_path / "a" / "b" / "c"
    assert [mode(tmp_path / part) for part in ("a", "a/b", "a/b/c")] == [0o700] * 3


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o755)
    files.make_private_folder(theirs / "ours")
    assert (mode(theirs), mode(theirs / "ours")) == (0o755, 0o700)


def test_making_a_folder_again_changes_nothing(tmp_path: Path) -> None:
    first = files.make_private_folder(tmp_path / "a")
    (first / "kept").touch()
    assert files.make_private_folder(tmp_path / "a") == first
    assert names(first) == ["kept"]


def test_the_root_given_by_the_user_may_be_a_link_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    files.make_private_folder(tmp_path / "link" / "state")
    assert mode(tmp_path / "real" / "state") == 0o700


def test_every_new_folder_is_durable_in_the_one_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    files.make_private_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("thing", [a_file, a_link_to_nowhere, a_link_to_itself, a_pipe])
@pytest.mark.parametrize("below", ["", "x", "x/y"])
def test_what_is_no_folder_is_named_and_left_alone(
    tmp_path: Path, thing: Callable[[Path], None], below: str
) -> None:
    thing(tmp_path / "state")
    before = identity(tmp_path / "state")
    with pytest.raises(FolderError) as caught:
        files.make_private_folder(tmp_path / "state" / below)
    assert caught.value.path == tmp_path / "state"
    assert identity(tmp_path / "state") == before
    assert names(tmp_path) == ["state"]


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "\ud800"], ids=["long", "NUL", "surrogate"])
def test_a_folder_no_system_could_make_is_a_folder_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FolderError):
        files.make_private_folder(tmp_path / name / "below")


def test_a_folder_that_may_not_be_looked_into_is_a_folder_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the superuser nothing is forbidden, so the system's answer is imitated."""
    closed = tmp_path / "closed"
    closed.mkdir()

    def forbid(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and closed in Path(path).parents:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
            return real(path, *args, **kwargs)

        return call

    for name in ("stat", "lstat", "mkdir"):
        monkeypatch.setattr(os, name, forbid(getattr(os, name)))
    with pytest.raises(FolderError, match="Permission denied") as caught:
        files.make_private_folder(closed / "a" / "b")
    assert caught.value.path == closed / "a"


@pytest.mark.skipif(AS_ROOT, reason="nothing is forbidden to the superuser")
def test_a_folder_that_may_not_be_written_is_a_folder_error(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(FolderError, match="Permission denied"):
        files.make_private_folder(tmp_path / "closed" / "a")


def test_a_disk_that_cannot_keep_a_new_folder_is_a_folder_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(FolderError, match="Input/output error"):
        files.make_private_folder(tmp_path / "a")


def test_folders_inside_are_made_and_private(tmp_path: Path, umask: int) -> None:
    made = files.make_folder_inside(tmp_path / "root", "runs", "wf_1")
    assert made == tmp_path / "root" / "runs" / "wf_1"
    assert [mode(made), mode(made.parent), mode(made.parent.parent)] == [0o700] * 3
    assert files.make_folder_inside(tmp_path / "root", "runs", "wf_1") == made


@pytest.mark.parametrize("thing", [a_file, a_link_to_nowhere, a_link_to_itself, a_pipe])
@pytest.mark.parametrize("below", [(), ("x",)], ids=["itself", "below it"])
def test_inside_only_real_folders_are_passed(
    tmp_path: Path, thing: Callable[[Path], None], below: tuple[str, ...]
) -> None:
    thing(tmp_path / "runs")
    with pytest.raises(FolderError) as caught:
        files.make_folder_inside(tmp_path, "runs", *below)
    assert caught.value.path == tmp_path / "runs"
    assert names(tmp_path) == ["runs"]


def test_inside_a_link_to_a_folder_is_refused_and_nothing_is_made_behind_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "runs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="symbolic link"):
        files.make_folder_inside(tmp_path / "root", "runs", "wf_1")
    assert names(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "../x", "/tmp", "a\0b", "a/.."], ids=ascii)
def test_inside_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    root = files.make_private_folder(tmp_path / "outer" / "root")
    with pytest.raises(InvalidIdentifierError):
        files.make_folder_inside(root, name, "made")
    assert names(root) == []
    assert names(tmp_path / "outer") == ["root"]


# --- writing ---------------------------------------------------------------------------------


def failing(number: int) -> Callable[..., NoReturn]:
    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("data", [b"", b"x", b"\0\xff\n", b"long" * 300_000])
def test_what_is_written_is_read_back(tmp_path: Path, data: bytes) -> None:
    files.write_atomically(tmp_path / "doc", data)
    assert files.read_whole(tmp_path / "doc") == data
    files.write_atomically(tmp_path / "doc", b"after")
    assert files.read_whole(tmp_path / "doc") == b"after"
    assert names(tmp_path) == ["doc"]


def test_a_written_file_is_private(tmp_path: Path, umask: int) -> None:
    files.write_atomically(tmp_path / "doc", b"x")
    assert mode(tmp_path / "doc") == 0o600


def test_a_file_open_to_all_is_private_once_it_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "doc").write_bytes(b"old")
    (tmp_path / "doc").chmod(0o666)
    files.write_atomically(tmp_path / "doc", b"new")
    assert mode(tmp_path / "doc") == 0o600


def test_a_file_is_written_and_synced_before_it_gets_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode)
            calls.append("fsync folder" if is_folder else name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("write", "fsync", "rename"):
        watch(name)
    files.write_atomically(tmp_path / "doc", b"x")
    assert calls == ["write", "fsync", "rename", "fsync folder"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    files.write_atomically(tmp_path / "doc", bytes(range(256)))
    assert (tmp_path / "doc").read_bytes() == bytes(range(256))


def test_a_disk_that_takes_nothing_is_an_error_and_not_an_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(AtomicWriteError):
        files.write_atomically(tmp_path / "doc", b"x")
    assert names(tmp_path) == []


def fails_after(real: Callable[[int, Any], int], number: int) -> Callable[[int, Any], int]:
    written: list[int] = []

    def write(fd: int, data: Any) -> int:
        if written:
            raise OSError(number, os.strerror(number))
        written.append(real(fd, data[:3]))
        return written[0]

    return write


FAILURES = [
    pytest.param("open", errno.EACCES, id="the folder cannot be opened"),
    pytest.param("fchmod", errno.EPERM, id="it cannot be made private"),
    pytest.param("write", errno.ENOSPC, id="the disk is full"),
    pytest.param("write", errno.EDQUOT, id="the quota is used up"),
    pytest.param("write", errno.EIO, id="the disk fails"),
    pytest.param("fsync", errno.EIO, id="fsync fails"),
    pytest.param("fsync", errno.ENOSPC, id="fsync finds the disk full"),
    pytest.param("rename", errno.EACCES, id="it cannot be renamed"),
    pytest.param("rename", errno.EROFS, id="the disk turned read-only"),
]


@pytest.mark.parametrize("call, number", FAILURES)
@pytest.mark.parametrize("old", [b"old", None], ids=["over an old file", "as a new file"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, old: bytes | None
) -> None:
    target = tmp_path / "doc"
    if old is not None:
        target.write_bytes(old)
    descriptors = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(number))
        with pytest.raises(AtomicWriteError) as caught:
            files.write_atomically(target, b"new")
    assert (target.read_bytes() if target.exists() else None) == old
    assert names(tmp_path) == ([] if old is None else ["doc"])
    assert caught.value.path == target
    assert os.strerror(number) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "doc").write_bytes(b"old")
    monkeypatch.setattr(os, "write", fails_after(os.write, number))
    with pytest.raises(AtomicWriteError):
        files.write_atomically(tmp_path / "doc", b"brand new")
    assert (tmp_path / "doc").read_bytes() == b"old"
    assert names(tmp_path) == ["doc"]


def test_a_folder_that_cannot_be_synced_is_told_and_the_old_file_is_not_called_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doc").write_bytes(b"old")
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(AtomicWriteError, match="could not be synced") as caught:
        files.write_atomically(tmp_path / "doc", b"new")
    assert "intact" not in str(caught.value)
    assert names(tmp_path) == ["doc"]


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interruption_leaves_the_old_file_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    interruption: type[BaseException],
) -> None:
    def interrupt(*args: object, **kwargs: object) -> NoReturn:
        raise interruption

    (tmp_path / "doc").write_bytes(b"old")
    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(interruption):
        files.write_atomically(tmp_path / "doc", b"new")
    assert (tmp_path / "doc").read_bytes() == b"old"
    assert names(tmp_path) == ["doc"]


def test_a_link_in_place_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"theirs")
    (tmp_path / "doc").symlink_to("victim")
    files.write_atomically(tmp_path / "doc", b"ours")
    assert (tmp_path / "victim").read_bytes() == b"theirs"
    assert not (tmp_path / "doc").is_symlink()
    assert (tmp_path / "doc").read_bytes() == b"ours"


def test_a_second_name_of_the_file_keeps_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "doc").write_bytes(b"old")
    os.link(tmp_path / "doc", tmp_path / "twin")
    files.write_atomically(tmp_path / "doc", b"new")
    assert (tmp_path / "twin").read_bytes() == b"old"


def test_a_link_in_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda length: "guessed")
    (tmp_path / "victim").write_bytes(b"theirs")
    (tmp_path / ".doc.guessed.tmp").symlink_to("victim")
    with pytest.raises(AtomicWriteError, match="File exists"):
        files.write_atomically(tmp_path / "doc", b"ours")
    assert (tmp_path / "victim").read_bytes() == b"theirs"
    assert not (tmp_path / "doc").exists()


def test_a_pipe_in_place_of_the_file_is_replaced_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "doc")
    files.write_atomically(tmp_path / "doc", b"ours")
    assert files.read_whole(tmp_path / "doc") == b"ours"


def test_a_folder_in_place_of_the_file_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "doc").mkdir()
    with pytest.raises(AtomicWriteError):
        files.write_atomically(tmp_path / "doc", b"x")
    assert (tmp_path / "doc").is_dir()
    assert names(tmp_path) == ["doc"]


@pytest.mark.parametrize("make", [lambda path: None, a_file, a_pipe], ids=["gone", "file", "pipe"])
def test_a_folder_that_is_none_is_an_atomic_write_error(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "folder")
    with pytest.raises(AtomicWriteError):
        files.write_atomically(tmp_path / "folder" / "doc", b"x")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "n" * 300], ids=["NUL", "surrogate", "long"])
def test_a_name_no_system_could_write_is_an_atomic_write_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(AtomicWriteError):
        files.write_atomically(tmp_path / name, b"x")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    ["x" * 255, "\u00e9" * 127, "\u6f22" * 85, "\U0001f600" * 63],
    ids=lambda name: ascii(name[0]),
)
def test_the_longest_possible_name_can_be_written(tmp_path: Path, name: str) -> None:
    files.write_atomically(tmp_path / name, b"x")
    assert names(tmp_path) == [name]


# --- a file that is just there ---------------------------------------------------------------


def test_a_created_file_is_empty_and_private(tmp_path: Path, umask: int) -> None:
    files.create_private(tmp_path / "journal")
    assert (tmp_path / "journal").read_bytes() == b""
    assert mode(tmp_path / "journal") == 0o600


def test_a_file_that_exists_keeps_its_content_and_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"kept")
    (tmp_path / "journal").chmod(0o644)
    files.create_private(tmp_path / "journal")
    assert (tmp_path / "journal").read_bytes() == b"kept"
    assert mode(tmp_path / "journal") == 0o600


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link_to_a_file(path: Path) -> None:
    victim = path.with_name("victim")
    victim.touch(mode=0o644)
    path.symlink_to(victim)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have 107 bytes only
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


NOT_FILES = [a_folder, a_link_to_a_file, a_link_to_nowhere, a_link_to_itself, a_pipe, a_socket]


@pytest.mark.parametrize("thing", NOT_FILES)
def test_only_a_regular_file_counts_as_there(tmp_path: Path, thing: Callable[[Path], None]) -> None:
    thing(tmp_path / "journal")
    before = names(tmp_path), mode(tmp_path / "journal")
    with pytest.raises(FolderError, match="regular file"):
        files.create_private(tmp_path / "journal")
    assert (names(tmp_path), mode(tmp_path / "journal")) == before


def test_a_file_that_cannot_be_created_is_a_folder_error(tmp_path: Path) -> None:
    with pytest.raises(FolderError):
        files.create_private(tmp_path / "missing" / "journal")


def test_a_created_file_that_would_not_last_is_a_folder_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(FolderError):
        files.create_private(tmp_path / "journal")


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", NOT_FILES)
def test_only_a_regular_file_is_read(tmp_path: Path, thing: Callable[[Path], None]) -> None:
    thing(tmp_path / "doc")
    descriptors = open_descriptors()
    with pytest.raises(DocumentCorruptError, match=r"symbolic link|regular file") as caught:
        files.read_whole(tmp_path / "doc")
    assert str(tmp_path / "doc") in str(caught.value)
    assert open_descriptors() == descriptors


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty"])
def test_a_device_is_not_read(device: str) -> None:
    with pytest.raises((DocumentCorruptError, OSError)):
        files.read_whole(Path(device))


def test_a_missing_file_is_simply_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.read_whole(tmp_path / "doc")


def test_a_file_up_to_the_limit_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "doc").write_bytes(b"12345")
    assert files.read_whole(tmp_path / "doc", limit=5) == b"12345"
    with pytest.raises(DocumentCorruptError, match="5 bytes, and the limit is 4"):
        files.read_whole(tmp_path / "doc", limit=4)


def test_a_file_that_grows_while_it_is_read_is_not_cut_off_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doc").write_bytes(b"12345")
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        facts = real(fd)
        (tmp_path / "doc").write_bytes(b"1234567")
        return facts

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(DocumentCorruptError, match="changed while it was read"):
        files.read_whole(tmp_path / "doc", limit=5)


# --- setting aside, removing, syncing --------------------------------------------------------


def test_a_damaged_file_is_kept_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "doc.json").write_bytes(b"torn")
    aside = files.set_aside(tmp_path / "doc.json")
    assert aside == tmp_path / "doc.json.damaged-1"
    assert aside.read_bytes() == b"torn"
    assert names(tmp_path) == ["doc.json.damaged-1"]
    assert list(tmp_path.glob("*.json")) == []


def test_no_damaged_file_replaces_an_earlier_one(tmp_path: Path) -> None:
    for content in ("first", "second", "third"):
        (tmp_path / "doc").write_text(content)
        files.set_aside(tmp_path / "doc")
    kept = [(tmp_path / f"doc.damaged-{n}").read_text() for n in (1, 2, 3)]
    assert kept == ["first", "second", "third"]


def test_a_link_among_the_damaged_is_neither_followed_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "doc").write_text("torn")
    (tmp_path / "doc.damaged-1").symlink_to("nowhere")
    assert files.set_aside(tmp_path / "doc") == tmp_path / "doc.damaged-2"
    assert (tmp_path / "doc.damaged-1").is_symlink()


def test_a_damaged_link_is_set_aside_itself(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / "doc").symlink_to("victim")
    assert files.set_aside(tmp_path / "doc").is_symlink()
    assert names(tmp_path) == ["doc.damaged-1", "victim"]


def test_a_damaged_file_that_is_gone_already_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.set_aside(tmp_path / "doc")


def test_too_many_damaged_files_are_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doc").write_text("torn")
    monkeypatch.setattr(os.path, "lexists", lambda path: True)
    with pytest.raises(FolderError, match="move them away"):
        files.set_aside(tmp_path / "doc")
    assert (tmp_path / "doc").read_text() == "torn"


def test_a_removed_file_is_gone_and_a_missing_one_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "doc").touch()
    files.remove(tmp_path / "doc")
    files.remove(tmp_path / "doc")
    assert names(tmp_path) == []


def test_a_file_whose_folder_is_gone_counts_as_removed(tmp_path: Path) -> None:
    files.remove(tmp_path / "gone" / "doc")


def test_removing_a_link_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (tmp_path / "doc").symlink_to("victim")
    files.remove(tmp_path / "doc")
    assert names(tmp_path) == ["victim"]


def test_setting_aside_and_removing_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    files.set_aside(tmp_path / "a")
    files.remove(tmp_path / "b")
    assert synced == [tmp_path, tmp_path]


def test_a_folder_is_synced_and_its_descriptor_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = open_descriptors()
    files.sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        files.sync_folder(tmp_path)
    assert open_descriptors() == descriptors
