"""Tries random graphs until some minutes are over, and says which differ.

``python -m tests.training.partition.many_graphs MINUTES [SEED]``. Without a seed it is the
day, so that each night tries other graphs. Some graphs at a time run in a process of their own:
TensorFlow forgets no graph.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

_AT_ONCE = 48  # graphs of one process


def main() -> int:
    """Return 1 if a graph differs from that of one process, otherwise 0."""
    minutes = float(sys.argv[1])
    first = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time() // 86_400) * 100
    end, seed, failed = time.monotonic() + 60 * minutes, first, []
    while time.monotonic() < end:
        test = "tests/training/partition/test_random_graphs.py::test_random_graphs"
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", test]
        settings = {"GRAPHS": str(_AT_ONCE), "SEED": str(seed)}
        if subprocess.run(
            command, env={**os.environ, **settings}, check=False
        ).returncode:
            failed.append(seed)
        seed += 1
    print(f"{(seed - first) * _AT_ONCE} graphs of the seeds {first} to {seed - 1}")
    for seed in failed:
        print(f"HINT: GRAPHS={_AT_ONCE} SEED={seed} python -m pytest {test}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
