"""The driver program for the test of Ray: ``ray_program.py ADDRESS``."""

from __future__ import annotations

import os
import signal
import sys

import ray

import collective.ray
from collective.ray import RayExecutor
from tests.cluster.functions import fails, report, sums


def killed() -> None:
    """Kill the actor of the second node, while all ranks wait."""
    import time

    import psutil

    import collective

    collective.init()
    if collective.rank() == collective.size() - 1:
        for process in psutil.process_iter():
            if process.name().startswith("ray::Worker"):
                same = os.stat(f"/proc/{process.pid}/ns/net").st_ino
                if same == os.stat("/proc/self/ns/net").st_ino:
                    os.kill(process.pid, signal.SIGKILL)
    while True:
        collective.barrier()
        time.sleep(0.2)


class Counter:
    """The object of an executor on each rank: it keeps a sum between calls."""

    def __init__(self, start: int, step: int = 1):
        import collective

        collective.init()
        self.total, self.step = start, step

    def add(self, number: int) -> tuple[int, int]:
        import collective

        self.total += number * self.step * (collective.rank() + 1)
        return collective.rank(), self.total


def executor() -> None:
    """Use Horovod's interface: the ranks of one start make many calls."""
    settings = RayExecutor.create_settings(placement_group_timeout_s=30)
    ranks = RayExecutor(settings, num_workers=4)
    report("early", lambda: ranks.run(sums, [1.0]))
    ranks.start(Counter, [100], {"step": 10}, extra_env_vars={"OF_USER": "there"})
    ranks.execute(lambda counter: counter.add(1))
    report("counters", lambda: ranks.execute(lambda counter: counter.add(2)))
    report("single", lambda: ranks.execute_single(lambda counter: counter.total))
    report("variable", lambda: ranks.run(os.getenv, args=["OF_USER"]))
    first = ranks.run_remote(sums, args=[10.0])
    second = ranks.run_remote(sums, kwargs={"base": 2.0})
    report("remote", lambda: [ray.get(first)[0][0], ray.get(second)[3][0]])
    report("raises", lambda: ranks.run(fails))
    report("ended", lambda: ranks.run(sums, [1.0]))
    ranks.shutdown()
    hosts = RayExecutor(settings, num_hosts=2, num_workers_per_host=1)
    hosts.start()
    report("hosts", lambda: sorted(place for *_, place in hosts.run(sums, [1.0])))
    report("lost", lambda: hosts.run(killed))
    hosts.shutdown()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
    if sys.argv[2:] == ["executor"]:
        executor()
        sys.exit()
    run = collective.ray.run
    report("sums", lambda: run(sums, (10.0,), num_workers=4))
    report("fails", lambda: run(fails, num_workers=4))
    report("killed", lambda: run(killed, num_workers=4))
    report("none", lambda: run(sums, (1.0,), num_workers=9, start_timeout=3))
    report("again", lambda: run(sums, (10.0,), num_workers=2))
