"""Ray on nodes of a cluster: make test-ray installs it into an environment of its own."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator

from tests.cluster.nodes import NETWORK, ROOT, Nodes, environment

PYTHON = ROOT / "build" / "clusters" / "bin" / "python"
ADDRESS = f"{NETWORK}.1:6379"
_WORDS = ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000"]
_WORDS += ["--disable-usage-stats", "--block"]
_HEAD = ["--head", "--port=6379", "--include-dashboard=false"]


@contextlib.contextmanager
def running(cluster: Nodes, node: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run Ray on a node, with two workers; node 1 leads."""
    words = _HEAD if node == 1 else [f"--address={ADDRESS}"]
    start = [str(PYTHON), "-m", "ray.scripts.scripts", "start", *words, *_WORDS]
    command = cluster.on(node, [*start, f"--node-ip-address={NETWORK}.{node}"])
    log = cluster.folder / f"ray{node}"
    with log.open("wb") as file:
        daemon = subprocess.Popen(
            command,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and daemon.poll() is None, (
                log.read_text()
            )
            time.sleep(0.3)
        yield daemon
    finally:
        daemon.terminate()
        daemon.wait(60)


def assert_nothing_left(cluster: Nodes, *nodes: int) -> None:
    """Check that no rank, agent, mpirun or file of a job is left on these nodes."""
    deadline = time.monotonic() + 15
    while left := [
        line
        for node in nodes
        for line in [*cluster.on_node(node).values(), *cluster.files(node)]
        if "run_function" in line or "prte" in line or "collective-" in line
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.3)
