"""Syncs files and folders to the disk, as far as their file system can."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from collective.errors import printable
from collective.log import log

# Some FUSE, NFS and object mounts have no fsync, or none of folders.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_warned: set[int] = set()  # devices


def sync(opened: int) -> None:
    """Sync an open file or folder to its disk.

    If the file system cannot do this, the first call for it warns, and no call fails.

    Raises:
        OSError: If the disk failed.
    """
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _warn_once(opened, error)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to its disk, as ``sync`` does."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(opened)
    finally:
        os.close(opened)


def _warn_once(opened: int, error: OSError) -> None:
    device = os.fstat(opened).st_dev
    if device in _warned:
        return
    _warned.add(device)
    path = os.readlink(f"/proc/self/fd/{opened}")
    log.warning(
        printable(
            f"{path} cannot be synced to its disk ({error.strerror}): if its host "
            "crashes, what was written last may be lost"
        )
    )
