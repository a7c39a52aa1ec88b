"""Jobs with agents: one process on each node, and no remote shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.nodes import NETWORK, Nodes, environment

PYTHON = sys.executable
PROGRAM = [PYTHON, "-m", "tests.cluster.programs"]
SECRET = {"COLLECTIVE_SECRET": "0123456789abcdef"}
HEAD = "node1:7070"


# The command is process 1 of a namespace of its own.
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


class Job:
    """The agents of a job; the agent of node ``i`` runs on ``node<i + 1>``."""

    def __init__(self, cluster: Nodes, folder: Path):
        self.cluster, self.folder = cluster, folder
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(
        self,
        node: int,
        *words: str,
        variables: dict[str, str] = SECRET,
        within: Sequence[str] = (),
    ) -> None:
        """Start one agent, within another program."""
        start = [*within, PYTHON, "-m", "collective.launch", "--agent", *words]
        with (self.folder / f"agent{node}").open("wb") as file:
            self.agents[node] = subprocess.Popen(
                self.cluster.on(node + 1, start),
                env={**environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_all(self, count: int, *words: str, head: str = HEAD) -> None:
        """Start the same command on so many nodes, the head last."""
        for node in reversed(range(count)):
            place = ["--nodes", str(count), "--node", str(node), "--head", head]
            self.start(node, *place, *words)

    def printed(self, node: int = 0) -> str:
        return (self.folder / f"agent{node}").read_text(errors="replace")

    def codes(self, seconds: float = 60) -> list[int]:
        """Return the exit codes, in the order of the nodes."""
        return [self.agents[node].wait(seconds) for node in sorted(self.agents)]

    def until(self, text: str, seconds: float = 60, node: int = 0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.printed(node):
            assert time.monotonic() < deadline, self.printed(node)
            time.sleep(0.1)

    def pids(self, node: int, words: str) -> list[int]:
        """Return the processes of a node whose command line has these words."""
        mine = self.cluster.on_node(node + 1)
        return [pid for pid, line in mine.items() if words in line]


@pytest.fixture
def job(cluster: Nodes, tmp_path: Path) -> Iterator[Job]:
    """Yield a job, and check that no process and no file of it stay on its nodes."""
    before = set(cluster.processes())
    made = Job(cluster, tmp_path)
    yield made
    left = cluster.left(before)
    for agent in made.agents.values():
        agent.kill()
        agent.wait()
    assert not left
    assert [cluster.files(n) for n in range(1, 5)] == [[]] * 4


def ranks(text: str) -> list[str]:
    """Return the node of each rank; check that their sums include all ranks."""
    found = sorted(re.findall(r"rank (\d+) of (\d+) on (\w+): (\d+), ", text))
    assert {size for _, size, *_ in found} == {str(len(found))}, text
    assert {total for *_, total in found} == {"1" * len(found)}, text
    return [node for _, _, node, _ in found]


def test_two_jobs_at_once(job, cluster, tmp_path):
    other = Job(cluster, tmp_path)
    job.start_all(2, "--slots-per-host", "2", *PROGRAM, "sums")
    other.folder = tmp_path / "other"
    other.folder.mkdir()
    other.start_all(2, *PROGRAM, "sums", head=f"{NETWORK}.1:7071")
    assert job.codes() == [0, 0], job.printed()
    assert other.codes() == [0, 0], other.printed()
    assert ranks(job.printed()) == ["node1", "node1", "node2", "node2"]
    assert ranks(other.printed()) == ["node1", "node2"]
    assert not job.printed(1) and not other.printed(1)


def test_daemons_start_no_daemons(job):
    """This is as on over 64 nodes: only the head can reach the agents."""
    radix = "--mpi-args=--prtemca rml_base_radix 1"
    job.start_all(4, radix, *PROGRAM, "sums")
    assert job.codes() == [0] * 4, job.printed()
    assert ranks(job.printed()) == ["node1", "node2", "node3", "node4"]


def test_slurm_and_tf_config_and_kubernetes_say_which_node_this_is(
    job, cluster, tmp_path
):
    names = '"node1:7072", "node2:7072"'
    for node in (1, 0):
        task = f'"task": {{"type": "worker", "index": {node}}}'
        config = f'{{"cluster": {{"worker": [{names}]}}, {task}}}'
        job.start(node, *PROGRAM, "sums", variables={**SECRET, "TF_CONFIG": config})
    assert job.codes() == [0, 0], job.printed()
    assert ranks(job.printed()) == ["node1", "node2"]
    pods = Job(cluster, tmp_path / "pods")
    pods.folder.mkdir()
    for node in (1, 0):
        variables = {**SECRET, "JOB_COMPLETION_INDEX": str(node)}
        words = ["--nodes", "2", "--head", "job-0.job:7070", *PROGRAM, "sums"]
        pods.start(node, *words, variables=variables, within=CONTAINER)
    assert pods.codes() == [0, 0], pods.printed()
    assert ranks(pods.printed()) == ["node1", "node2"]


def test_srun_starts_the_agents(cluster, job_variables):
    before = set(cluster.processes())
    words = ["-N2", "--ntasks-per-node=1", PYTHON, "-m", "collective.launch", "--agent"]
    more = ["--slots-per-host", "2", *PROGRAM, "sums"]
    done = cluster.run(1, ["srun", *words, *more], **SECRET, **job_variables)
    assert done.returncode == 0, done.stderr
    assert ranks(done.stdout) == ["node1", "node1", "node2", "node2"]
    assert not cluster.left(before)


# An agent and its watchdog; on node 0 the launcher follows.
AGENT, _, LAUNCHER = range(3)


def kill(node: int, which: int) -> Callable[[Job], None]:
    def strike(job: Job) -> None:
        os.kill(job.pids(node, "collective.launch ")[which], signal.SIGKILL)

    return strike


def kill_rank(job: Job) -> None:
    os.kill(job.pids(1, "programs waits")[-1], signal.SIGKILL)


def stop_head(job: Job) -> None:
    job.agents[0].terminate()


def kill_daemon(job: Job) -> None:
    os.kill(job.pids(1, "prted")[-1], signal.SIGKILL)


@pytest.mark.parametrize(
    "fault, message, node",
    [
        (kill(1, AGENT), "lost the agent of node 1, node2", 0),
        (kill(0, AGENT), "lost the head", 1),
        (kill(0, LAUNCHER), "", 1),
        (kill_rank, "ended by SIGKILL", 0),
        (kill_daemon, "node2", 0),
        (stop_head, "", 1),
    ],
)
def test_the_job_ends_everywhere(job, fault: Callable[[Job], None], message, node):
    job.start_all(2, "--slots-per-host", "2", *PROGRAM, "waits")
    job.until("at work")
    fault(job)
    codes = job.codes(30)
    assert all(codes), codes
    assert message in job.printed(node)


def test_a_silent_node_is_lost(job, cluster):
    job.start_all(2, "--heartbeat", "4", *PROGRAM, "waits")
    job.until("at work")
    with cluster.cut(2):
        codes = job.codes(40)
    assert all(codes), codes
    assert "lost the agent of node 1, node2" in job.printed()
    assert "lost the head" in job.printed(1)


def test_a_wrong_secret_another_version_and_no_head_are_named(job, cluster):
    place = ["--nodes", "3", "--head", HEAD, "--start-timeout", "8"]
    job.start(0, *place, "--node", "0", *PROGRAM, "sums")
    wrong = {"COLLECTIVE_SECRET": "another secret of 25 chars"}
    job.start(1, *place, "--node", "1", *PROGRAM, "sums", variables=wrong)
    other = (
        "import sys; from collective.launch.agents import settings; "
        "settings.PROTOCOL = 99; from collective.launch.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["-c", other, "--agent", *place, "--node", "2", *PROGRAM, "sums"]
    done = cluster.run(3, [PYTHON, *words], **SECRET)
    assert done.returncode == 2
    assert "sent this node away: it has collective" in done.stderr
    assert job.codes() == [124, 2]
    assert "does not accept this node's secret" in job.printed(1)
    assert "HINT: COLLECTIVE_SECRET_FILE" in job.printed(1)
    said = job.printed()
    assert f"{NETWORK}.2 was sent away: another program answers" in said
    assert f"node 2, node3 ({NETWORK}.3), was sent away" in said
    assert "1 of 3 nodes within 8 s; missing: node 1, 2" in said
    alone = Job(cluster, job.folder)
    alone.start(1, *place, "--node", "1", *PROGRAM, "sums")
    assert alone.codes() == [124]
    assert f"no head at {HEAD} within 8 s" in alone.printed(1)


LOSSES = [*PROGRAM, "trains"]


@pytest.mark.parametrize("backend", ["native", "mpi", "tf-multiworker"])
def test_the_losses_are_those_of_one_process(job, cluster, backend):
    alone = cluster.run(1, [*LOSSES, "single"])
    assert alone.returncode == 0, alone.stderr
    job.start_all(2, *LOSSES, backend)
    assert job.codes(200) == [0, 0], job.printed()
    losses = re.findall(r"losses .*", job.printed())
    assert losses == alone.stdout.splitlines() * 2


def test_an_elastic_job_grows_by_a_node_and_continues_without_one(job, cluster):
    stop = cluster.folder / "stop"
    elastic = ["--min-np", "1", "--max-np", "3", "--heartbeat", "4"]
    words = ["--head", HEAD, *elastic, *PROGRAM, "elastic", str(stop)]
    for node in (1, 0):
        job.start(node, "--nodes", "2", "--node", str(node), *words)
    job.until("on 2 ranks", 90)
    job.start(2, "--nodes", "3", "--node", "2", *words)
    job.until("on 3 ranks", 120)
    kill(2, AGENT)(job)
    many = job.printed().rindex("on 3 ranks")
    deadline = time.monotonic() + 120
    while "on 2 ranks" not in job.printed()[many:]:
        assert time.monotonic() < deadline, job.printed()
        time.sleep(0.2)
        many = job.printed().rindex("on 3 ranks")
    stop.touch()
    codes = job.codes(60)
    assert codes[:2] == [0, 0] and codes[2], job.printed()
    assert "lost the agent of node 2, node3" in job.printed()
    # A job that grows keeps its state; after the loss of a node it begins again.
    batches = [int(n) for n in re.findall(r"batch (\d+) on", job.printed()[:many])]
    assert batches == [*range(len(batches))]
