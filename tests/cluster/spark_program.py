"""The driver program for the test of Spark: ``spark_program.py MASTER ADDRESS [FOLDER]``."""

from __future__ import annotations

import io
import os
import signal
import sys

import numpy as np
from pyspark import SparkConf, SparkContext

import collective.spark
from tests.cluster.functions import fails, loses_a_rank, report, sums, trains


def killed() -> None:
    """Kill the Python worker that runs the agent of the last rank's node."""
    import psutil

    import collective

    collective.init()
    if collective.rank() == collective.size() - 1:
        for process in psutil.Process().parents():
            if "pyspark.daemon" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                break
    while True:
        collective.barrier()


def printed() -> str:
    """Return the number of the ranks' lines in the caller's stream."""
    stream = io.StringIO()
    collective.spark.run(
        print, ["of a rank"], num_proc=2, env={"A": "1"}, stdout=stream
    )
    return str(stream.getvalue().count("of a rank"))


def faults(folder: str) -> None:
    """Lose a rank; then train while the test kills a task and an executor."""
    elastic = collective.spark.run_elastic
    once = f"{folder}/lost"
    report(
        "elastic", lambda: elastic(loses_a_rank, (once,), num_proc=4, min_num_proc=1)
    )
    losses = elastic(trains, (folder, 0.3), num_proc=4, min_num_proc=1)
    assert all(each == losses[0] for each in losses), losses
    alone = trains(f"{folder}/alone", 0, len(losses[0]))
    np.testing.assert_allclose(losses[0], alone, rtol=1e-4)
    print("results", len(losses), len(alone))


if __name__ == "__main__":
    conf = SparkConf().setMaster(sys.argv[1]).setAppName("collective")
    conf.set("spark.ui.enabled", "false").set("spark.executor.memory", "512m")
    conf.set("spark.pyspark.python", sys.executable)
    if len(sys.argv) > 2:
        conf.set("spark.driver.host", sys.argv[2])
    run = collective.spark.run
    if sys.argv[3:]:
        with SparkContext(conf=conf):
            faults(sys.argv[3])
        sys.exit()
    report("early", lambda: run(sums, (10.0,), num_proc=2))
    with SparkContext(conf=conf) as context:
        context.setLogLevel("OFF")
        report("sums", lambda: run(sums, (10.0,), num_proc=4))
        report("fails", lambda: run(fails, num_proc=4))
        report("many", lambda: run(sums, (1.0,), num_proc=9, start_timeout=3))
        report("printed", printed)
        report("killed", lambda: run(killed, num_proc=4))
        report("again", lambda: run(sums, kwargs={"base": 10.0}, num_proc=2))
