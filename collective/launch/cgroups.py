"""A cgroup for each rank, below that of this process: nothing that a rank starts leaves it.

Of version 2, and only where this process may make one: as root, in a systemd unit with
``Delegate=yes``, or in a container whose ``/sys/fs/cgroup`` can be written. No controller
is switched on, so limits and shares stay those of the group above. Source: the kernel's
Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from collective.running_time import Deadline

_PREFIX = "collective-"
_KILL = "cgroup.kill"  # Linux 5.14
_PROCESSES = "cgroup.procs"
_POLL_SECONDS = 0.001
_OLD_SECONDS = 3600.0


def _own() -> Path | None:
    """The cgroup of this process; None where no hierarchy of version 2 is mounted."""
    with contextlib.suppress(OSError):
        inside = Path("/proc/self/cgroup").read_text().splitlines()
        path = next((line[3:] for line in inside if line.startswith("0::")), None)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if path is not None and fields[fields.index("-") + 1] == "cgroup2":
                root, mounted = fields[3:5]
                return Path(mounted, os.path.relpath(path, root))
    return None


@functools.cache
def _remove_left(own: Path) -> None:
    """Removes what jobs have left that were killed whole, with the process that cleans up.

    The system removes empty ones alone. One that is not old may be about to be entered.
    """
    for group in own.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - group.stat().st_mtime > _OLD_SECONDS:
                group.rmdir()


def make(mark: str) -> Path | None:
    """Makes a cgroup for the rank with this mark; None where that is not permitted."""
    own = _own()
    if own is None:
        return None
    _remove_left(own)
    group = own / (_PREFIX + mark)
    with contextlib.suppress(OSError):
        group.mkdir()
        if (group / _KILL).exists():
            return group
        group.rmdir()
    return None


def enter(group: Path) -> None:
    """Moves this process into a cgroup, if that is permitted."""
    with contextlib.suppress(OSError):
        (group / _PROCESSES).write_text("0")


def find(mark: str) -> list[Path]:
    """Returns the cgroups, of this process or a sibling, of marks that begin so."""
    own = _own()
    return sorted(own.glob(f"{_PREFIX}{mark}*")) if own else []


def kill(group: Path, keep: Callable[[int], bool]) -> None:
    """Kills all processes of a cgroup, and of those below it.

    Args:
        keep: Whether a process is to stay: it moves to the cgroup above.
    """
    with contextlib.suppress(OSError):
        for processes in group.rglob(_PROCESSES):
            for pid in filter(keep, map(int, processes.read_text().split())):
                (group.parent / _PROCESSES).write_text(str(pid))
        (group / _KILL).write_text("1")


def remove(groups: Iterable[Path], seconds: float) -> None:
    """Removes cgroups and those below them, as soon as what was killed in them is gone."""
    deadline = Deadline(seconds)
    for group in groups:
        while group.exists():
            below = [path.parent for path in group.rglob(_KILL)]
            for each in sorted(below, key=lambda path: len(path.parts), reverse=True):
                with contextlib.suppress(OSError):  # not yet empty
                    each.rmdir()
            if deadline.passed():
                break
            time.sleep(_POLL_SECONDS)
