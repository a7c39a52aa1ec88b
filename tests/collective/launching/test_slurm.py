"""Jobs under a real Slurm of two nodes, both this machine: srun, and the batch file.

They are skipped if Debian's slurmctld, slurmd and slurm-client are not installed.
test_environment.py tests without them how srun's variables are read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import settings
from tests.launch import capture

ROOT = Path(__file__).parents[3]
PATH = os.environ["PATH"] + ":/usr/sbin"
SECONDS = 60


def program(name: str) -> str | None:
    return shutil.which(f"{name}-wlm", path=PATH) or shutil.which(name, path=PATH)


CONTROLLER, DAEMON, STEP = map(program, ("slurmctld", "slurmd", "slurmstepd"))
pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(
        not (CONTROLLER and DAEMON and shutil.which("srun")) or os.geteuid() != 0,
        reason="no Slurm to start (apt install slurmctld slurmd), or not root",
    ),
]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the environment in which srun and sbatch reach our own Slurm."""
    assert CONTROLLER and DAEMON
    home = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().split(".")[0]
    ports = free_ports(3)
    lines = [
        *settings(home, DAEMON),
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "ProctrackType=proctrack/pgid",
        f"NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4",
        f"NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4",
        "PartitionName=all Nodes=ALL Default=YES",
    ]
    (home / "slurm.conf").write_text("\n".join(lines) + "\n")
    env = {
        **{n: v for n, v in os.environ.items() if not n.startswith("SLURM_")},
        "SLURM_CONF": str(home / "slurm.conf"),
        "PYTHONPATH": str(ROOT),
    }
    step = ["-d", STEP] if STEP else []
    commands = [
        [CONTROLLER, "-D", "-c"],
        [DAEMON, "-D", "-N", "n1", *step],
        [DAEMON, "-D", "-N", "n2", *step],
    ]
    daemons = [
        subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            nodes = run(["sinfo", "-h", "-o", "%D %t"], env).stdout.split()
            if nodes == ["2", "idle"]:
                break
            if time.monotonic() > deadline:
                pytest.skip(f"this Slurm does not start: {nodes}")
            time.sleep(0.2)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def run(command, env, seconds=SECONDS):
    return capture(command, seconds, env=env, cwd=ROOT)


PLACE = (
    "from collective.environment import detect as d; e = d(); print(e.launcher, "
    "e.rank, e.size, e.local_rank, e.local_size, e.cross_rank, e.cross_size)"
)


@pytest.mark.parametrize(
    "arguments, wanted",
    [
        (
            ["-N2", "-n3"],
            ["srun 0 3 0 2 0 2", "srun 1 3 1 2 0 1", "srun 2 3 0 1 1 2"],
        ),
        (
            ["-N1", "-n2", "--mpi=pmi2"],
            ["srun 0 2 0 2 0 1", "srun 1 2 1 2 0 1"],
        ),
    ],
)
def test_srun_gives_every_task_its_rank(slurm, arguments, wanted):
    done = run(["srun", *arguments, sys.executable, "-c", PLACE], slurm)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == wanted


def test_the_native_core_sums_under_srun(slurm):
    from collective import library

    if not library.path().exists():
        pytest.skip("the core was not built")
    code = (
        "import collective as c, numpy as np; c.init()\n"
        "print(c.allreduce(np.array([10.0 ** c.rank()]), op=c.Sum)[0])"
    )
    done = run(["srun", "-N1", "-n3", sys.executable, "-c", code], slurm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["111.0"] * 3


def test_a_script_for_horovod_under_srun(slurm, tmp_path):
    from collective import library

    pytest.importorskip("tensorflow")
    if not library.path().exists():
        pytest.skip("the core was not built")
    script = tmp_path / "tape_loop.py"
    source = (ROOT / "examples" / "horovod" / "tape_loop.py").read_text()
    script.write_text(source.replace("horovod", "collective"))
    done = run(["srun", "-N1", "-n2", sys.executable, str(script)], slurm)
    assert done.returncode == 0, done.stderr
    assert "tape_loop: loss 3.202 to 0.0598 on 2 ranks" in done.stdout


def test_the_launcher_reads_the_allocation(slurm):
    code = "from collective.launch.__main__ import main; main(['--gloo', 'true'])"
    command = ["salloc", "-N2", "-n3", sys.executable, "-c", code]
    done = run(command, slurm)
    assert "in the Slurm allocation: n1:2,n2:1" in done.stderr


def test_the_batch_file(slurm, tmp_path):
    # This needs one node with the name of this machine, so that nothing needs ssh.
    batch = tmp_path / "job"
    text = (ROOT / "deploy" / "slurm.sbatch").read_text()
    batch.write_text(text.replace("\n#SBATCH --nodes=2\n", "\n#SBATCH --nodes=1\n"))
    env = {**slurm, "PATH": f"{Path(sys.executable).parent}:{PATH}"}
    printed = tmp_path / "printed"
    arguments = ["--wait", f"--output={printed}", "-n2", "--ntasks-per-node=2"]
    words = ["-H", "localhost:2", "python", "-c", "print('a rank')"]
    done = run(["sbatch", *arguments, str(batch), *words], env)
    assert done.returncode == 0, done.stderr + printed.read_text()
    assert sorted(printed.read_text().splitlines()) == ["[0] a rank", "[1] a rank"]
