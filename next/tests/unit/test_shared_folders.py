"""Folders where a journal would not be safe: on the network, or copied by a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from maestro_hive.kernel.errors import FolderError
from maestro_hive.kernel.files import refuse_shared_folder

LOCAL = ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "apfs", "fuseblk"]
NETWORK = [
    "nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "lustre", "glusterfs", "fuse.sshfs",
    "fuse.s3fs", "fuse.rclone", "fuse.glusterfs", "fuse.gcsfuse", "vboxsf", "beegfs",
]  # fmt: skip


def line(point: str, kind: str, *, optional: str = "shared:1 ", source: str = "src") -> str:
    return f"36 35 98:0 / {point} rw,noatime {optional}- {kind} {source} rw,errors=continue"


def mounts(*lines: str) -> str:
    return "\n".join(lines) + "\n"


ROOT = line("/", "ext4")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder whose parents carry no marker of a synchronising program."""
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


# --- file systems ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOCAL)
def test_a_local_file_system_is_accepted(home: Path, kind: str) -> None:
    refuse_shared_folder(home, mounts(ROOT, line(str(home), kind)))


@pytest.mark.parametrize("kind", NETWORK)
def test_a_network_file_system_is_refused_by_name(home: Path, kind: str) -> None:
    with pytest.raises(FolderError) as caught:
        refuse_shared_folder(home, mounts(ROOT, line(str(home), kind)))
    assert caught.value.path == home
    assert f"network file system ({kind})" in str(caught.value)
    assert "local disk" in str(caught.value)


def test_a_folder_deep_inside_a_network_mount_is_refused(home: Path) -> None:
    text = mounts(ROOT, line(str(home), "nfs4", source="server:/export"))
    with pytest.raises(FolderError, match="nfs4"):
        refuse_shared_folder(home / "a" / "not made yet", text)


def test_a_local_mount_inside_a_network_mount_is_accepted(home: Path) -> None:
    text = mounts(ROOT, line(str(home), "nfs4"), line(str(home / "disk"), "ext4"))
    refuse_shared_folder(home / "disk" / "state", text)


def test_a_network_mount_inside_a_local_mount_is_refused_in_either_order(home: Path) -> None:
    inner, outer = line(str(home / "net"), "cifs"), line(str(home), "xfs")
    for text in (mounts(ROOT, inner, outer), mounts(ROOT, outer, inner)):
        with pytest.raises(FolderError, match="cifs"):
            refuse_shared_folder(home / "net", text)
        refuse_shared_folder(home / "network", text)


def test_a_neighbour_whose_name_begins_alike_does_not_count(home: Path) -> None:
    refuse_shared_folder(home / "data-local", mounts(ROOT, line(str(home / "data"), "nfs4")))


def test_of_two_mounts_at_one_place_the_later_is_on_top(home: Path) -> None:
    local, network = line(str(home), "ext4"), line(str(home), "nfs4")
    refuse_shared_folder(home, mounts(ROOT, network, local))
    with pytest.raises(FolderError, match="nfs4"):
        refuse_shared_folder(home, mounts(ROOT, local, network))


def test_a_root_on_the_network_is_refused_for_every_folder(home: Path) -> None:
    with pytest.raises(FolderError, match="nfs4"):
        refuse_shared_folder(home, mounts(line("/", "nfs4")))
    with pytest.raises(FolderError, match="nfs4"):
        refuse_shared_folder(Path("/"), mounts(line("/", "nfs4")))


@pytest.mark.parametrize(
    "name, written",
    [
        ("my disk", r"my\040disk"),
        ("two  spaces", r"two\040\040spaces"),
        ("a - b", r"a\040-\040b"),
        ("tab\there", r"tab\011here"),
        ("line\nend", r"line\012end"),
        ("back\\slash", r"back\134slash"),
        ("back\\040slash", r"back\134040slash"),
        ("hash#sign", r"hash\043sign"),
        ("no\u00a0break", "no\u00a0break"),
        ("line\u2028separator", "line\u2028separator"),
        ("f\u00f6rm\x0cfeed", "f\u00f6rm\x0cfeed"),
    ],
    ids=ascii,
)
def test_an_odd_mount_point_is_recognised_as_the_kernel_writes_it(
    home: Path, name: str, written: str
) -> None:
    text = mounts(ROOT, line(f"{home}/{written}", "nfs4"))
    with pytest.raises(FolderError, match="nfs4"):
        refuse_shared_folder(home / name / "state", text)
    refuse_shared_folder(home / "other", text)


@pytest.mark.parametrize("optional", ["", "shared:1 ", "shared:1 master:2 ", "unbindable "])
def test_the_optional_fields_of_a_mount_do_not_matter(home: Path, optional: str) -> None:
    with pytest.raises(FolderError, match="9p"):
        refuse_shared_folder(home, mounts(ROOT, line(str(home), "9p", optional=optional)))


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "1 2 3 4", "1 2 3 4 / rw", " - nfs4 a b"])
def test_what_the_kernel_would_never_write_refuses_nothing(home: Path, text: str) -> None:
    refuse_shared_folder(home, text)


def test_a_link_is_judged_by_where_it_leads(home: Path) -> None:
    (home / "net").mkdir()
    (home / "link").symlink_to("net")
    with pytest.raises(FolderError, match="nfs4") as caught:
        refuse_shared_folder(home / "link" / "state", mounts(ROOT, line(f"{home}/net", "nfs4")))
    assert caught.value.path == home / "link" / "state"


def test_the_mounts_of_this_machine_can_be_read(home: Path) -> None:
    refuse_shared_folder(home)


# --- folders that a program copies -----------------------------------------------------------

MARKERS = [
    (".dropbox", False, "Dropbox"),
    (".dropbox.cache", True, "Dropbox"),
    (".stfolder", True, "Syncthing"),
    (".stfolder", False, "Syncthing"),
    (".nextcloudsync.log", False, "Nextcloud"),
    (".owncloudsync.log", False, "ownCloud"),
    (".849C9593-D756-4E56-8D6E-42412F2A707B", False, "OneDrive"),
]


def mark(path: Path, *, folder: bool) -> None:
    if folder:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("marker, folder, program", MARKERS)
@pytest.mark.parametrize("below", ["", "project", "project/.maestro/state"])
def test_a_synchronised_folder_is_refused_by_program(
    home: Path, marker: str, folder: bool, program: str, below: str
) -> None:
    mark(home / "synced" / marker, folder=folder)
    with pytest.raises(FolderError, match=f"synchronised by {program}") as caught:
        refuse_shared_folder(home / "synced" / below, mounts(ROOT))
    assert str(home / "synced") in str(caught.value)
    refuse_shared_folder(home / "elsewhere", mounts(ROOT))


def test_the_settings_that_dropbox_keeps_in_a_home_do_not_make_the_home_synchronised(
    home: Path,
) -> None:
    """``~/.dropbox`` is a folder, in every home that uses Dropbox; the mark is a file."""
    (home / ".dropbox").mkdir()
    (home / "Dropbox").mkdir()
    (home / "Dropbox" / ".dropbox").touch()
    refuse_shared_folder(home / ".maestro" / "state", mounts(ROOT))
    with pytest.raises(FolderError, match="Dropbox"):
        refuse_shared_folder(home / "Dropbox" / "state", mounts(ROOT))


@pytest.mark.parametrize(
    "inside, program",
    [
        ("Library/Mobile Documents/com~apple~CloudDocs/x", "iCloud Drive"),
        ("Library/CloudStorage/GoogleDrive-me/x", "a cloud drive"),
    ],
)
def test_the_cloud_folders_of_a_mac_are_refused(home: Path, inside: str, program: str) -> None:
    with pytest.raises(FolderError, match=f"synchronised by {program}"):
        refuse_shared_folder(home / inside, mounts(ROOT))


@pytest.mark.parametrize("inside", ["Mobile Documents/x", "CloudStorage/x", "Library/x"])
def test_an_ordinary_folder_of_that_name_is_accepted(home: Path, inside: str) -> None:
    refuse_shared_folder(home / inside, mounts(ROOT))
