"""Processes that should end and do not, and those that the kernel ends for lack of memory.

A process that was killed never runs its program again, but it may never disappear: if it is
frozen (cgroup, ``docker pause``), traced, or in an uninterruptible sleep on a file system
that does not answer. It counts as dead. A process of another kind has ended its work, and its
interpreter does not end, because a thread or a process that it has started keeps it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from collective.elastic import membership_file
from collective.elastic.membership_file import MembershipFile
from collective.launch import processes
from collective.launch.output import print_message
from collective.running_time import Deadline, Lasting

DEAD_SECONDS = 5.0  # after which a process that was killed counts as dead
_LOOK_SECONDS = 0.5
_POLL_SECONDS = 0.05
MEMORY_HINT = (
    "\nHINT: the kernel has killed a process of this host for lack of memory since the job "
    "began: a smaller batch, fewer ranks a host, or a higher limit (docker run --memory, "
    "Slurm's --mem); `dmesg` may name it"
)


class Undead:
    """Processes that were killed and are still there."""

    def __init__(self) -> None:
        self._lasting: dict[int, Lasting] = {}
        self._looked = 0.0
        self._left: dict[int, str] = {}

    def look(self, pids: Iterable[int], killed: set[int]) -> list[int]:
        """Return the processes that still exist some seconds after they were killed.

        Args:
            pids: Children of this process that have not been reaped.
            killed: The pids to which this process has sent SIGKILL.
        """
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return []
        self._looked = time.monotonic()
        found = []
        for pid in pids:
            lasting = self._lasting.setdefault(pid, Lasting(DEAD_SECONDS))
            if lasting.since(pid in killed or processes.kill_is_pending(pid)):
                found.append(pid)
        return found

    def leave(self, pid: int, name: str) -> None:
        """Report a process for which the job does not wait any more."""
        self._left[pid] = name
        print_message(
            f"{name} (process {pid}) was killed and has not ended within "
            f"{DEAD_SECONDS:g} s ({processes.describe_state(pid)}): it counts as dead"
        )

    def report(self, seconds: float) -> None:
        """Name the processes that still exist after so many seconds, at the end of the job."""
        deadline = Deadline(seconds)
        while self._left:
            for pid in list(self._left):
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(pid, os.WNOHANG)[0] == 0:
                        continue
                del self._left[pid]
            if deadline.passed():
                break
            time.sleep(_POLL_SECONDS)
        for pid, name in self._left.items():
            print_message(
                f"left behind: {name}, process {pid} ({processes.describe_state(pid)}): "
                "it was killed, runs no more of its program, and ends when the kernel "
                f"lets it\nHINT: cat /proc/{pid}/cgroup /proc/{pid}/wchan shows whether "
                "it is frozen, or waits for a file system"
            )


class Lingering:
    """Ranks whose work is over and whose processes do not end.

    Args:
        membership: The file in which they note that their work is over.
        seconds: How long they may take.
    """

    def __init__(self, membership: MembershipFile, seconds: float) -> None:
        self._membership, self._seconds = membership, seconds
        self._lasting: dict[int, Lasting] = {}

    def look(
        self, ranks: Iterable[tuple[int, int]], name: Callable[[int], str]
    ) -> list[int]:
        """Report and return the ranks that have taken too long.

        Args:
            ranks: Number and process of each running rank.
            name: How messages call a rank.
        """
        found = []
        for rank, pid in ranks:
            lasting = self._lasting.setdefault(pid, Lasting(self._seconds))
            if not lasting.since(self._membership.read(rank) in membership_file.OVER):
                continue
            found.append(rank)
            kept_by = processes.describe_children(pid)
            print_message(
                f"{name(rank)} (process {pid}) has finished its work and not ended within "
                f"{self._seconds:g} s{kept_by and f'; it has started {kept_by}'}: killed it\n"
                "HINT: end the threads and processes that the program starts; "
                "COLLECTIVE_TIMEOUT=seconds gives it more time"
            )
        return found


def count_memory_kills() -> int:
    """Return how often the kernel has killed a process of this host for lack of memory.

    It counts since the start of the host, and includes kills for the limit of a cgroup.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def set_oom_score(process: object, score: str) -> str:
    """Set how soon the kernel kills a process if memory runs out.

    Args:
        process: Its number, or ``self``; what it starts later inherits the score.
        score: 1000 means before all others.

    Returns:
        The score before; empty if the score cannot be changed.
    """
    path = Path(f"/proc/{process}/oom_score_adj")
    try:
        before = path.read_text().strip()
        path.write_text(score)
    except OSError:
        return ""
    return before
