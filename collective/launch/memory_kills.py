"""Whether the kernel has killed processes of this host for lack of memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

HINT = (
    "\nHINT: the kernel has killed a process of this host for lack of memory since the job "
    "began: a smaller batch, fewer ranks a host, or a higher limit (docker run --memory, "
    "Slurm's --mem); `dmesg` may name it"
)


def count() -> int:
    """How often it has since the host was started, within the limits of cgroups, too."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def set_oom_score(process: object, score: str) -> str:
    """Says how soon the kernel kills a process where memory runs out.

    Args:
        process: Its number, or ``self``; what it starts later inherits the score.
        score: 1000: before all others.

    Returns:
        Its score before; empty where the score cannot be changed.
    """
    path = Path(f"/proc/{process}/oom_score_adj")
    try:
        before = path.read_text().strip()
        path.write_text(score)
    except OSError:
        return ""
    return before
