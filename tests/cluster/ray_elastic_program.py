"""The driver program for tests of elastic jobs on Ray.

``ray_elastic_program ADDRESS FOLDER LEAST START MOST``, or ``ADDRESS FOLDER``.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import ray

import collective.ray
from collective.ray import RayExecutor
from tests.cluster.functions import loses_a_rank, report, sums, trains
from tests.cluster.ray_program import Counter


def training(folder: str, least: int, start: int, most: int) -> None:
    """Train on ranks that join and leave; then in this process."""
    losses = collective.ray.run(
        trains,
        (folder, 0.3),
        num_workers=start,
        min_workers=least,
        max_workers=most,
    )
    assert all(each == losses[0] for each in losses), losses
    alone = trains(f"{folder}/alone", 0, len(losses[0]))
    np.testing.assert_allclose(losses[0], alone, rtol=1e-4)
    print("results", len(losses), len(alone))


def executor(folder: str) -> None:
    """Use Horovod's interface: each call is a job of its own."""
    settings = RayExecutor.create_settings(placement_group_timeout_s=30)
    ranks = RayExecutor(settings, min_workers=1, num_workers=2, max_workers=2)
    report("early", lambda: ranks.run(sums, [1.0]))
    ranks.start(Counter, [100], {"step": 10}, extra_env_vars={"OF_USER": "there"})
    report("sums", lambda: [each[:2] for each in ranks.run(sums, [10.0])])
    report("execute", lambda: ranks.execute(lambda counter: counter.add(1)))
    report("variable", lambda: ranks.run(os.getenv, args=["OF_USER"]))
    report("remote", lambda: ranks.run_remote(sums, [1.0]))
    report("single", lambda: ranks.execute_single(sums))
    report("lost", lambda: ranks.run(loses_a_rank, [f"{folder}/lost"]))
    ranks.shutdown()
    few = RayExecutor(settings, min_workers=2, reset_limit=3)
    report("hosts", lambda: RayExecutor(settings, min_workers=1, num_hosts=1))
    report("order", lambda: RayExecutor(settings, min_workers=2, max_workers=1))
    few.start()
    report("again", lambda: [each[:2] for each in few.run(sums, [10.0])])
    few.shutdown()


if __name__ == "__main__":
    ray.init(address=sys.argv[1], logging_level="error")
    if sys.argv[3:]:
        training(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        executor(sys.argv[2])
