"""Files that only this user can write; they are checked before they are used.

An object that is unpickled, or a library that is installed, from a file can do anything. So
the file, once it is open, must be a plain file of this user that no other user can write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

import platformdirs

from collective.errors import CollectiveError

StrPath = str | os.PathLike[str]
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def cache_folder() -> Path:
    """Return the user's folder for files of ours that can be made again.

    It is ``$XDG_CACHE_HOME/collective``, by default ``~/.cache/collective``, and need not
    exist.
    """
    return platformdirs.user_cache_path("collective", appauthor=False)


def write(path: StrPath, data: bytes) -> None:
    """Make a file that only this user can read, or none.

    Raises:
        OSError: The file cannot be made, or its name exists, perhaps as a link.
    """
    opened = os.open(path, _NEW, 0o600)
    try:
        with open(opened, "wb") as file:
            file.write(data)
    except OSError:  # as of a full disk
        with contextlib.suppress(OSError):
            os.remove(path)
        raise


def read(path: StrPath) -> bytes:
    """Return the contents of a file of this user.

    Raises:
        CollectiveError: If the file is a link, belongs to another user, or others may write it.
        OSError: If it cannot be read.
    """
    try:
        opened = os.open(path, _READ)
    except OSError as error:
        if os.path.islink(path):
            raise _foreign(path, "is a link") from None
        raise error
    with open(opened, "rb") as file:
        _check(path, os.fstat(file.fileno()))
        return file.read()


def open_output(path: StrPath, flags: int = 0) -> int:
    """Open a file to read and write, made if it is missing; return its descriptor.

    In a folder that others can write, too, a name may be theirs: a link to another file of
    this user, a pipe that nobody reads, or a file that they read.

    Args:
        flags: Further flags of ``os.open``. A file is not cut with ``O_TRUNC``, which would
            precede the check, but with ``os.ftruncate``.

    Raises:
        OSError: Also if it is a link, not a plain file, or of a user who is neither this
            one nor the owner of its folder.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", path) from None
        raise
    try:
        found, folder = os.fstat(opened), os.stat(os.path.dirname(path) or ".")
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", path)
        if found.st_uid not in (os.geteuid(), folder.st_uid):
            raise PermissionError(errno.EPERM, "it is another user's", path)
    except OSError:
        os.close(opened)
        raise
    return opened


def check(path: StrPath) -> None:
    """Check a folder, or a file in a folder that was checked.

    Raises:
        CollectiveError: As for ``read``.
        OSError: If it does not exist.
    """
    _check(path, os.lstat(path))


def folder(path: Path) -> None:
    """Make a folder that only this user can use; check it if it exists.

    Raises:
        CollectiveError: As for ``read``.
        OSError: If it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    check(path)


def _check(path: StrPath, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise _foreign(path, "is a link")
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise _foreign(path, "is not a file")
    if found.st_uid != os.geteuid():
        raise _foreign(path, f"belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _foreign(path, "can be written by other users")


def _foreign(path: StrPath, why: str) -> CollectiveError:
    return CollectiveError(
        f"{os.fspath(path)} {why}: its contents cannot be trusted",
        hint=f"see who made it (ls -ld {os.fspath(path)}), and remove it or forbid "
        f"others to write it: chmod go-w {os.fspath(path)}",
    )
