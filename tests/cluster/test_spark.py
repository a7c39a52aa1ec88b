"""A Spark of two nodes: make test-spark installs it into an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.cluster.nodes import NETWORK, ROOT, Nodes, environment
from tests.cluster.training import Training

PYTHON = ROOT / "build" / "clusters" / "bin" / "python"
MASTER = f"spark://{NETWORK}.1:7077"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no Spark: make test-spark"),
    pytest.mark.skipif(
        not shutil.which("java"), reason="no java: apt-get install default-jre-headless"
    ),
]
_CLASSES = {
    "master": "org.apache.spark.deploy.master.Master",
    "worker": "org.apache.spark.deploy.worker.Worker",
}


def start(cluster: Nodes, node: int, kind: str) -> subprocess.Popen[bytes]:
    """Start a daemon of Spark on a node; return when it runs."""
    address = f"{NETWORK}.{node}"
    (home,) = PYTHON.parents[1].glob("lib/python3*/site-packages/pyspark")
    words = [str(home / "bin" / "spark-class"), _CLASSES[kind], "--host", address]
    words += ["--webui-port", "0"]
    if kind == "master":
        words += ["--port", "7077"]
    else:
        words += ["--cores", "2", "--memory", "1g", MASTER]
        words += ["--work-dir", str(cluster.folder / f"spark{node}")]
    log = cluster.folder / f"{kind}{node}"
    with log.open("wb") as file:
        daemon = subprocess.Popen(
            cluster.on(node, words),
            env={
                **environment(),
                "SPARK_LOCAL_IP": address,
                "SPARK_NO_DAEMONIZE": "1",
                "SPARK_DAEMON_MEMORY": "256m",
            },
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = {"master": "I have been elected leader", "worker": "registered with"}
    deadline = time.monotonic() + 120
    while running[kind] not in log.read_text():
        assert time.monotonic() < deadline and daemon.poll() is None, log.read_text()
        time.sleep(0.3)
    return daemon


@pytest.fixture
def spark(cluster: Nodes) -> Iterator[Nodes]:
    """Run Spark on the first two nodes, with two cores on each."""
    daemons = []
    try:
        for node, kind in ((1, "master"), (1, "worker"), (2, "worker")):
            daemons.append(start(cluster, node, kind))
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(60)


def test_a_function_on_every_rank(spark):
    words = [str(PYTHON), "-m", "tests.cluster.spark_program", MASTER, f"{NETWORK}.1"]
    done = spark.run(1, words, 500, SPARK_LOCAL_IP=f"{NETWORK}.1")
    assert done.returncode == 0, done.stderr
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert found["early"].startswith("UsageError collective.spark: there is no Spark")
    places = [(1111.0, r, "node1" if r < 2 else "node2") for r in range(4)]
    places_reversed = [(s, r, "node2" if r < 2 else "node1") for s, r, _ in places]
    assert found["sums"] in (str(places), str(places_reversed))
    assert found["fails"].startswith(
        "CollectiveError collective.spark.run: rank 1 failed"
    )
    assert "ValueError: of rank 1" in found["fails"]
    assert "Spark did not have 9 tasks free at once within 3 s" in found["many"]
    assert found["printed"] == "2"
    assert "a task or its executor was lost" in found["killed"]
    assert found["again"].startswith("[(11.0, 0, ")
    for node in (1, 2):  # nothing stays of the job whose task was killed
        lines = spark.on_node(node).values()
        assert not [line for line in lines if "run_function" in line or "prte" in line]
    logs = spark.folder.glob("spark*/app-*/*/stderr")
    reports = [log for log in logs if "the job failed; exit codes" in log.read_text()]
    assert len(reports) == 2  # the executors of all tasks


def test_an_elastic_job_resumes_after_the_loss_of_a_task_or_an_executor(spark):
    folder = spark.folder / "faults"
    folder.mkdir()
    words = [str(PYTHON), "-m", "tests.cluster.spark_program", MASTER, f"{NETWORK}.1"]
    job = Training(spark, folder, [*words, str(folder)], SPARK_LOCAL_IP=f"{NETWORK}.1")
    at = job.until(4)
    job.kill(2, "pyspark.daemon", since=-1)
    at = job.until(4, at)
    job.kill(2, "CoarseGrainedExecutorBackend")
    job.until(4, at)
    job.assert_losses(4)
    assert "elastic [111, 111, 111]" in job.text() or "elastic [1111, " in job.text()
    epochs = job.epochs()
    again = [n for n, epoch in enumerate(epochs) if n and epoch <= epochs[n - 1]]
    assert len(again) <= 2 and 0 not in epochs[1:], epochs  # resumed, each time
    for node in (1, 2):
        lines = spark.on_node(node).values()
        assert not [line for line in lines if "run_function" in line or "prte" in line]
