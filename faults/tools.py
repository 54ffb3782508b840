"""Programs that the rows need: found, or installed where the system lets us."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

#: Program → Debian package.
_PACKAGES = {
    "strace": "strace",
    "faketime": "faketime",
    "unshare": "util-linux",
    "mkfs.xfs": "xfsprogs",
    "mkfs.ext4": "e2fsprogs",
    "mount": "mount",
}
_SBIN = "/usr/sbin:/sbin"


def find(program: str) -> str | None:
    """Return where a program is, looking also where only root looks."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


@cache
def missing(*programs: str) -> str:
    """Install what is missing; return why it cannot be used, or nothing."""
    wanted = sorted({_PACKAGES[each] for each in programs if find(each) is None})
    if not wanted:
        return ""
    names = " ".join(wanted)
    if find("apt-get") is None or os.geteuid() != 0:
        return f"{names} is missing, and only root on a Debian system can have it installed"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    codes = [
        subprocess.run(
            ["apt-get", *words], env=environment, capture_output=True, check=False, timeout=300
        ).returncode
        for words in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *wanted])
    ]
    if codes[-1]:
        return f"{names} is missing, and apt-get could not install it"
    return "" if all(find(each) for each in programs) else f"{names} was installed, but not found"


def unprivileged() -> str:
    """Say why file systems cannot be mounted here, or nothing."""
    return "" if os.geteuid() == 0 else "only root can mount file systems"
