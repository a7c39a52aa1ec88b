"""What the driver of the test of Spark runs: ``spark_program.py MASTER ADDRESS``."""

from __future__ import annotations

import io
import os
import signal
import sys

from pyspark import SparkConf, SparkContext

import collective.spark
from tests.cluster.functions import fails, report, sums


def killed() -> None:
    """Kills the Python worker that runs the agent of the last rank's node."""
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
    """What the stream of the caller gets."""
    stream = io.StringIO()
    collective.spark.run(
        print, ["of a rank"], num_proc=2, env={"A": "1"}, stdout=stream
    )
    return str(stream.getvalue().count("of a rank"))


if __name__ == "__main__":
    conf = SparkConf().setMaster(sys.argv[1]).setAppName("collective")
    conf.set("spark.ui.enabled", "false").set("spark.executor.memory", "512m")
    conf.set("spark.pyspark.python", sys.executable)
    if sys.argv[2:]:
        conf.set("spark.driver.host", sys.argv[2])
    run = collective.spark.run
    report("early", lambda: run(sums, (10.0,), num_proc=2))
    with SparkContext(conf=conf) as context:
        context.setLogLevel("OFF")
        report("sums", lambda: run(sums, (10.0,), num_proc=4))
        report("fails", lambda: run(fails, num_proc=4))
        report("many", lambda: run(sums, (1.0,), num_proc=9, start_timeout=3))
        report("printed", printed)
        report("killed", lambda: run(killed, num_proc=4))
        report("again", lambda: run(sums, kwargs={"base": 10.0}, num_proc=2))
