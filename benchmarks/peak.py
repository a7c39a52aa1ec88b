"""Peak resident memory of a training of three steps, in a process of its own.

As the operating system counts it: a process' peak never falls, so each setting needs
a new one.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any, NamedTuple

MIB = 1 << 20


class Peak(NamedTuple):
    """MiB before the model and after the training; seconds of the fastest step."""

    before: float
    after: float
    seconds: float


def peak() -> float:
    """Peak resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def measured(**options: Any) -> Peak:
    """Trains on one device.

    Args:
        options: Fields of ``collective.training.command.Job``.
    """
    command = [sys.executable, __file__, json.dumps(options)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return Peak(*map(float, out.stdout.split()[-3:]))


def main() -> None:
    """Trains what the argument says, and prints the numbers."""
    from collective.backends.quiet import quiet

    with quiet():
        from collective.training import command
    before = peak()
    fields = {"backend": "single", "steps": 3, "verbose": 0, "test": False}
    summary = command.run(command.Job(**fields, **json.loads(sys.argv[1])))
    print(before, peak(), min(summary.step_seconds[1:]))


if __name__ == "__main__":
    main()
