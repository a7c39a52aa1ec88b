"""Hosts that are not there, are cut off, or differ: on network namespaces."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.catalogue.killed import KEPT
from tests.faults.catalogue.members import ALIKE, no_step_again
from tests.faults.catalogue.survived import undisturbed
from tests.faults.catalogue.wrong import program
from tests.faults.fault import JSON, OPEN_MPIS, Fault, training
from tests.faults.job import PATIENCE, Job
from tests.hosts import lab
from tests.hosts.lab import NETWORK, Lab

# Cached, because it makes a host, and removes all hosts.
why_not = functools.cache(lab.why_not)
TWO = ("-H", f"{NETWORK}.1:2,{NETWORK}.2:2")
SUMS = program("""
    from pathlib import Path

    Path(os.environ["FAULT_FOLDER"], f"process-{rank}").write_text(str(os.getpid()))
    while True:
        for n in (1, 300_000, 3_000_000):
            result = collective.allreduce(np.full(n, float(rank)), collective.Sum)
            assert (result == size * (size - 1) / 2).all()
""")


def on_hosts(
    name: str, words: list[str], promise: str, code: int, **more: Any
) -> Fault:
    return Fault(
        name,
        words,
        promise,
        code,
        launcher="collectiverun, 2 hosts",
        ranks=4,
        needs=why_not,
        on_hosts=True,
        **({"seconds": 10} | more),
    )


def _at_work(job: Job, rank: int) -> int:
    """Return a rank's process after all ranks have summed for a moment."""
    for one in range(4):
        job.wait_for(f"process-{one}")
    time.sleep(0.5)
    return int(job.wait_for(f"process-{rank}").read_text())


def _killed(job: Job) -> None:
    process = _at_work(job, 3)
    job.strikes(lambda: os.kill(process, signal.SIGKILL))


def _cut(job: Job) -> None:
    """Cut a host off; neither our launcher nor mpirun can end its processes."""
    _at_work(job, 3)
    job.strikes(lambda: job.until_end(job.hosts.cut(2)))
    job.launcher.wait(PATIENCE)
    job.hosts.end_all()


def _cut_at_once(job: Job) -> None:
    job.strikes(lambda: job.until_end(job.hosts.cut(2)))
    job.launcher.wait(PATIENCE)
    job.hosts.end_all()  # processes that wait on the unreachable host


def _other_keras(folder: Path, hosts: Lab) -> None:
    other = folder / "keras-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: keras\nVersion: 0.0.1"
    )
    hosts.agent_with(2, folder)


def survived(who: str, victims: str, backend: str) -> Fault:
    words = [*TWO, "--min-np", "2", "--mpi-args=-x FAULT -x FAULT_FOLDER"]
    return on_hosts(
        f"kill -9 of {who} in all-reduce, --min-np 2",
        [*words, *training(*KEPT, *JSON, backend=backend)],
        "the others redo the step and continue; the losses are the undisturbed ones, "
        "and the ledger is perfect",
        code=0,
        seconds=None,
        inside=f"kill all-reduce {victims} 7",
        holds=undisturbed,
        backend=backend,
        leaves=OPEN_MPIS,
    )


def left(who: str, leavers: str, backend: str) -> Fault:
    words = [*TWO, "--min-np", "2", "--mpi-args=-x FAULT -x FAULT_FOLDER"]
    stay = 4 - len(leavers.split(","))
    return on_hosts(
        f"SIGTERM to {who}, --min-np 2",
        [*words, *training(*KEPT, *JSON, backend=backend)],
        f"it leaves after the step under way, and the others continue; {ALIKE}",
        code=0,
        seconds=None,
        # Ranks without a row in a short batch notice it a step later.
        messages=(rf"ranks? .* left; {stay} ranks continue from step (8|9|10) ",),
        inside=f"terminate forward {leavers} 7",
        holds=no_step_again([4, stay]),
        backend=backend,
        leaves=OPEN_MPIS,
    )


FAULTS = [
    left("rank 0", "0", "native"),
    left("all ranks of a host", "2,3", "native"),
    left("all ranks of a host", "0,1", "mpi"),
    survived("rank 0", "0", "native"),
    survived("all ranks of a host", "0,1", "native"),
    survived("all ranks of a host", "2,3", "mpi"),
    on_hosts(
        "a host that cannot be reached",
        ["-H", f"{NETWORK}.1:2,{NETWORK}.99:2", "true"],
        "nothing starts; names the host, and ssh's words",
        code=1,
        messages=(
            rf"cannot reach every host:\n  {NETWORK}.99: .*(route|reachable|timed)",
            "HINT: this must work without a password",
        ),
    ),
    on_hosts(
        "a host name that is not known",
        ["-H", f"{NETWORK}.1:2,nowhere.invalid:2", "true"],
        "nothing starts; names the host, and ssh's words",
        code=1,
        messages=(
            r"cannot reach every host:\n  nowhere.invalid: .*(not known|resolution)",
            "HINT: this must work without a password",
        ),
    ),
    on_hosts(
        "kill -9 of a rank on the other host",
        [*TWO, *SUMS],
        "the job ends, and names the rank and its host",
        code=128 + signal.SIGKILL,
        strike=_killed,
        messages=("rank 3 of 4 on lab2 failed: it ended by SIGKILL",),
    ),
    on_hosts(
        "a link is severed: a host falls silent",
        [*TWO, *SUMS],
        "the job ends, and names the host and its ranks",
        code=1,
        seconds=20,
        strike=_cut,
        leaves=OPEN_MPIS,
        messages=(
            "the connection to lab2 was lost; what became of rank 2, 3 of 4",
            "HINT",
        ),
    ),
    on_hosts(
        "a host that cannot connect back",
        [*TWO, "true"],
        "the job ends; names from which address to which",
        code=124,
        strike=_cut_at_once,
        messages=(
            "[24] of 4 ranks did not start",
            rf"{NETWORK}.2: no connection from it to {NETWORK}.1: ",
            "firewall",
        ),
    ),
    on_hosts(
        "another version of Keras on one host",
        ["--remote-shell", "{folder}/agent", *TWO, "true"],
        "nothing starts; the error says what differs, and where",
        code=1,
        before=_other_keras,
        messages=(
            rf"keras: \S+ on this host; 0.0.1 on {NETWORK}.2\n",
            "HINT: install the same on every host",
        ),
    ),
]
