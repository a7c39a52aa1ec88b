"""Private files of a rank: what a script writes by relative paths stays with its rank.

Every rank runs the script, so every rank would write ``results.csv``. Here each rank but 0
works in a folder of its own, which looks like the working directory: symbolic links stand
for what is there. Before a file is opened for writing, or a folder is changed, its link is
replaced by a copy. An audit hook of Python sees that beforehand, whichever library opens
the file. So the files that remain are rank 0's. The rest of the path is mirrored, too:
``../data`` is where it was.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import filecmp
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

# Events of Python's audit hooks, and how many paths they begin with.
_CHANGES = {"os.truncate": 1, "os.chmod": 1, "os.utime": 1}
_REMOVALS = {"os.rmdir": 1, "shutil.rmtree": 1, "os.remove": 1, "os.rename": 2}
_MAKES = {"os.mkdir": 1, "os.link": 2, "os.symlink": 2}
_OF_FOLDERS = ("os.rmdir", "shutil.rmtree")
_PATHS = _CHANGES | _REMOVALS | _MAKES
_WRITES = os.O_WRONLY | os.O_RDWR


class PrivateFiles:
    """A working directory of this process, made of links to the one that it had."""

    def __init__(self) -> None:
        self.real = os.getcwd()  # the working directory that it had
        # The folder that stands for ``/``.
        self.root = os.path.realpath(tempfile.mkdtemp(prefix="collective-private-"))
        self._removed: set[str] = set()
        self._busy = False
        self._active = True
        self._links(self.root, os.sep)
        self._own_folder(self.root + self.real)
        os.chdir(self.root + self.real)
        sys.addaudithook(self._before)
        atexit.register(self.close)

    def close(self) -> None:
        """Returns to the real working directory, and removes the copies."""
        if self._active:
            self._active = False
            with contextlib.suppress(OSError):
                os.chdir(self.real)
            shutil.rmtree(self.root, ignore_errors=True)

    def hand_over(self) -> list[str]:
        """Makes the private files the real ones: this process has become rank 0.

        What rank 0 has not written yet is taken from here; what it has written stays.
        Paths that the script has of this folder are those of the real files from now on.

        Returns:
            Real files that rank 0 has left, possibly in the middle of writing them, with
            another content than here.
        """
        doubtful = []
        if self._active:
            self._active = False
            doubtful = sorted(self._publish())
            self._reopen()
            folder = os.getcwd().removeprefix(self.root)
            shutil.rmtree(self.root, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.symlink(os.sep, self.root)
                atexit.register(os.unlink, self.root)
            os.chdir(folder)
        return doubtful

    def has(self, path: str) -> bool:
        """Whether an absolute path is one of the private files."""
        return self._active and path.startswith(self.root + os.sep)

    def refresh(self) -> None:
        """Links to what rank 0 has written since, where this rank has nothing."""
        with self._quietly():
            for folder, folders, _ in os.walk(self.root):
                paths = {name: os.path.join(folder, name) for name in folders}
                folders[:] = [
                    n for n, path in paths.items() if not os.path.islink(path)
                ]
                self._links(folder, folder[len(self.root) :] or os.sep)

    def own(self, path: Any, emptied: bool = False) -> None:
        """Puts a copy in the place of a link: of a file, or of a folder's entries.

        Args:
            path: As the script gives it; nothing happens if it is another file.
            emptied: Whether the content is not needed.
        """
        self._change(path, self._own_entry, emptied)

    # What follows runs within ``_quietly``.

    def _links(self, folder: str, real: str) -> None:
        """Links to the entries of a real folder that a private one does not have."""
        with contextlib.suppress(OSError):
            for name in os.listdir(real):
                path = os.path.join(folder, name)
                if path not in self._removed and not os.path.lexists(path):
                    os.symlink(os.path.join(real, name), path)

    def _own_folder(self, folder: str) -> None:
        """Puts folders of links in the place of a link to a folder, and of those above."""
        if len(folder) <= len(self.root):
            return
        self._own_folder(os.path.dirname(folder))
        real = self._behind(folder)
        if real and os.path.isdir(real):
            os.unlink(folder)
            os.mkdir(folder)
            self._links(folder, real)

    def _own_entry(self, path: str, emptied: bool = False) -> None:
        self._own_folder(os.path.dirname(path))
        real = self._behind(path)
        if real and os.path.isdir(real):
            self._own_folder(path)
        elif real:
            os.unlink(path)
            if not emptied and os.path.exists(real):
                shutil.copy2(real, path)

    def _behind(self, path: str) -> str:
        """What a link of ours stands for; nothing of other files."""
        target = os.readlink(path) if os.path.islink(path) else ""
        return target if os.path.isabs(target) and not self.has(target) else ""

    def _before(self, event: str, args: tuple[Any, ...]) -> None:
        """The audit hook: called before Python does something to files."""
        if not self._active or self._busy:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITES:
                self._change(path, self._own_entry, bool(flags & os.O_TRUNC))
            return
        if event not in _PATHS:
            return
        count = _PATHS[event]
        if event != "os.truncate" and any(
            isinstance(fd, int) and fd >= 0 for fd in args[-count:]
        ):
            return  # relative to an open folder, which is ours already
        for path in args[:count]:
            whole = event in _CHANGES or event in _OF_FOLDERS
            self._change(path, self._own_entry if whole else self._own_parent)
        if event in _REMOVALS and self._private(args[0]):
            self._removed.add(self._private(args[0]))

    def _publish(self) -> Iterator[str]:
        """Copies what is not there; yields real files that differ."""
        for folder, folders, files in os.walk(self.root):
            real = folder.removeprefix(self.root) or os.sep
            with contextlib.suppress(OSError):
                os.makedirs(real, exist_ok=True)
            folders[:] = [n for n in folders if not os.path.islink(f"{folder}/{n}")]
            for name in files:
                mine, path = os.path.join(folder, name), os.path.join(real, name)
                if os.path.islink(mine) and self._behind(mine):
                    continue
                if not os.path.lexists(path):
                    shutil.copy2(mine, path, follow_symlinks=False)
                elif not _same(mine, path):
                    yield path

    def _reopen(self) -> None:
        """Has files that are open for writing here continue in the real ones."""
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                file, path = int(number), os.readlink(f"/proc/self/fd/{number}")
                flags = fcntl.fcntl(file, fcntl.F_GETFL)
                if path.startswith(self.root + os.sep) and flags & _WRITES:
                    real = os.open(path.removeprefix(self.root), flags)
                    os.lseek(real, os.lseek(file, 0, os.SEEK_CUR), os.SEEK_SET)
                    os.dup2(real, file, inheritable=os.get_inheritable(file))
                    os.close(real)

    def _own_parent(self, path: str) -> None:
        self._own_folder(os.path.dirname(path))

    def _change(self, path: Any, change: Callable[..., None], *args: Any) -> None:
        private = self._private(path)
        if private:
            self._removed.discard(private)
            with self._quietly(), contextlib.suppress(OSError):
                change(private, *args)

    def _private(self, path: Any) -> str:
        """The absolute path, where it is one of ours; else nothing."""
        if not isinstance(path, str | bytes | os.PathLike):
            return ""
        whole = os.path.abspath(os.fsdecode(path))
        return whole if self.has(whole) else ""

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Leaves alone what this class itself does to files."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _same(one: str, other: str) -> bool:
    """Whether two files have the same content."""
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False
