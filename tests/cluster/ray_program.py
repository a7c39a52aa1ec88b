"""What the driver of the test of Ray runs: ``ray_program.py ADDRESS``."""

from __future__ import annotations

import os
import signal
import sys

import ray

import collective.ray


def sums(base: float) -> tuple[float, int, str]:
    import socket

    import numpy as np

    import collective

    collective.init()
    total = collective.allreduce(
        np.array([base ** collective.rank()]), op=collective.Sum
    )
    return float(total[0]), collective.rank(), socket.gethostname()


def fails() -> None:
    import collective

    collective.init()
    if collective.rank() == 1:
        raise ValueError("of rank 1")


def killed() -> None:
    """Kills the actor of the second node, while all ranks wait."""
    import time

    import psutil

    import collective

    collective.init()
    if collective.rank() == collective.size() - 1:
        for process in psutil.process_iter():
            if process.name().startswith("ray::Worker.run"):
                same = os.stat(f"/proc/{process.pid}/ns/net").st_ino
                if same == os.stat("/proc/self/ns/net").st_ino:
                    os.kill(process.pid, signal.SIGKILL)
    while True:
        collective.barrier()
        time.sleep(0.2)


def report(what: str, call) -> None:
    try:
        print(what, call(), flush=True)
    except Exception as error:
        print(what, type(error).__name__, str(error).replace("\n", " | "), flush=True)


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
    run = collective.ray.run
    report("sums", lambda: run(sums, (10.0,), num_workers=4))
    report("fails", lambda: run(fails, num_workers=4))
    report("killed", lambda: run(killed, num_workers=4))
    report("none", lambda: run(sums, (1.0,), num_workers=9, start_timeout=3))
    report("again", lambda: run(sums, (10.0,), num_workers=2))
