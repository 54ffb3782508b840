"""Where a state folder may lie: on a local disk, and where nothing else copies it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import FolderError

if TYPE_CHECKING:
    from collections.abc import Iterator

_NETWORK_TYPES = frozenset(
    "nfs nfs3 nfs4 cifs smb3 smbfs 9p afs ceph lustre gfs2 ocfs2 ncpfs coda vboxsf davfs beegfs"
    " glusterfs fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs fuse.rclone fuse.davfs2 fuse.gcsfuse"
    " fuse.goofys fuse.grpcfuse fuse.juicefs fuse.mergerfs osxfs".split()
)
#: How the kernel writes spaces, tabs, line ends and backslashes in the name of a mount point.
_ESCAPED = re.compile(r"\\([0-7]{3})")
#: Files by which the programs that synchronise folders mark them.
_SYNC_MARKERS = {
    ".dropbox": "Dropbox",
    ".dropbox.cache": "Dropbox",
    ".stfolder": "Syncthing",
    ".nextcloudsync.log": "Nextcloud",
    ".owncloudsync.log": "ownCloud",
    ".849C9593-D756-4E56-8D6E-42412F2A707B": "OneDrive",
}
_SYNC_PARENTS = {"Mobile Documents": "iCloud Drive", "CloudStorage": "a cloud drive"}


def refuse_shared_folder(folder: Path, mountinfo: str | None = None) -> None:
    """Raise if ``folder`` is on a network file system or in a folder that is synchronised.

    SQLite's locks and shared memory do not hold there, and a half-copied journal is a lost one.
    """
    kind = _file_system_type(folder, mountinfo)
    if kind in _NETWORK_TYPES:
        reason = f"is on a network file system ({kind}), where locks do not hold"
        raise FolderError(folder, f"{reason}; choose a folder on a local disk")
    for parent in _upwards(folder):
        program = _SYNC_PARENTS.get(parent.name) if "Library" in parent.parts else None
        for marker, name in _SYNC_MARKERS.items():
            if _is_marked(parent / marker):
                program = name
        if program:
            reason = f"is synchronised by {program} (at {parent}), which would copy half a journal"
            raise FolderError(folder, f"{reason}; choose a folder outside it")


def _is_marked(marker: Path) -> bool:
    if marker.name == ".dropbox":  # a folder of this name holds the settings, in the user's home
        return os.path.isfile(marker)  # noqa: PTH113 - Path's versions raise what the disk says
    return os.path.exists(marker)  # noqa: PTH110


def _upwards(folder: Path) -> Iterator[Path]:
    resolved = folder.resolve()
    yield resolved
    yield from resolved.parents


def _file_system_type(folder: Path, mountinfo: str | None) -> str | None:
    if mountinfo is None:
        try:
            mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
        except OSError:
            return None
    best, kind = "", None
    where = str(folder.resolve()) + "/"
    for line in mountinfo.split("\n"):
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4]).rstrip("/") + "/"
        # The last of equal mount points is the one on top.
        if where.startswith(point) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind
