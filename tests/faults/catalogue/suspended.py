"""Jobs, hosts and ranks that stand still as a whole, and what cannot be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from tests import freezer
from tests.faults.catalogue.hosts import TWO, on_hosts
from tests.faults.catalogue.killed import KEPT
from tests.faults.catalogue.survived import undisturbed
from tests.faults.fault import JSON, OPEN_MPIS, Fault, training
from tests.faults.job import PATIENCE, Job
from tests.faults.undisturbed import as_undisturbed

SECONDS = 15  # longer than one rank may be later than the others in init
WORDS = ("--min-np", "2", "--rank-timeout", str(SECONDS))


def suspend(job: Job, seconds: float) -> None:
    """Stop every process of a job for a while."""
    stopped = job.processes()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(seconds * (number == signal.SIGSTOP))


def _freezes(job: Job) -> None:
    with freezer.frozen([job.struck(1)]):
        job.launcher.wait(PATIENCE)


def _suspends(job: Job) -> None:
    job.struck(0)
    time.sleep(0.5)
    suspend(job, SECONDS + 3)


def _all_continued(job: Job) -> None:
    undisturbed(job)
    assert "died" not in job.text and "killed" not in job.text, job.text


def _stops_a_host(job: Job) -> None:
    """Stop a host; neither mpirun nor our launcher can end its processes."""
    job.wait_for("struck-2")
    assert job.hosts is not None
    for process in job.hosts.processes_of(2):
        with contextlib.suppress(ProcessLookupError):  # the process was about to end
            os.kill(process, signal.SIGSTOP)
    job.launcher.wait(PATIENCE)
    job.hosts.end_all()


def _stops_a_host_early(job: Job) -> None:
    """Stop a host after its ranks have started, since the launcher waits longer before."""
    job.wait_for("struck-3")
    time.sleep(1.0)
    _stops_a_host(job)


# Behaves like a data loader that starts its workers in the first epoch.
FORKS = """
import multiprocessing, time
import keras, numpy as np, collective
class Loads(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        fork = multiprocessing.get_context("fork")
        fork.Process(target=time.sleep, args=(1000,), daemon=True).start()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((40, 4), "float32")
collective.fit(model, x, x[:, :1], batch_size=20, verbose=0, callbacks=[Loads()])
"""

# Ranks of the second host, which therefore never reach MPI_Init.
LATE = (
    '[ "$OMPI_COMM_WORLD_RANK" -lt 2 ] || '
    '{{ touch "$FAULT_FOLDER/struck-$OMPI_COMM_WORLD_RANK"; sleep 1000; }}; exec "$@"'
)

FAULTS = [
    Fault(
        f"a rank is frozen and cannot die, --min-np 2, --rank-timeout {SECONDS}",
        training(*KEPT, *JSON),
        "it counts as dead, the others continue, and the launcher names it; the losses "
        "are the undisturbed ones, and the ledger is perfect",
        code=0,
        seconds=None,
        messages=(r"left behind: rank 1, process \d+ \(state",),
        inside="report forward 1 7",
        strike=_freezes,
        holds=undisturbed,
        launcher_options=WORDS,
        ranks=3,
        variables={"FAULT_PACE": "0.3"},
        needs=freezer.why_not,
    ),
    Fault(
        f"the whole job is suspended for {SECONDS + 3} s, --min-np 2, --rank-timeout "
        f"{SECONDS}",
        training(*KEPT, *JSON),
        "it continues as if no time had passed, with all ranks; the losses are the "
        "undisturbed ones, and the ledger is perfect",
        code=0,
        seconds=None,
        inside="sleep forward 0 7",
        strike=_suspends,
        holds=_all_continued,
        launcher_options=WORDS,
        ranks=3,
    ),
    Fault(
        "a process forked in fit, that does not end, --min-np 1",
        [sys.executable, "-c", FORKS],
        "it ends with the job",
        code=0,
        seconds=None,
        launcher_options=("--min-np", "1"),
    ),
    Fault(
        "a rank starts a daemon (setsid), that does not end",
        training(*KEPT, *JSON),
        "it ends with the job",
        code=0,
        seconds=None,
        inside="daemon forward 1 7",
        holds=undisturbed,
    ),
    Fault(
        "a rank gives its communicator up (MPI_Abort)",
        training(backend="mpi"),
        "the job ends",
        code=3,
        seconds=10,
        inside="abort forward 1 7",
        backend="mpi",
        leaves=OPEN_MPIS,
    ),
    on_hosts(
        f"all processes of a host stand still, --min-np 2, --rank-timeout {SECONDS}",
        [
            *(*TWO, *WORDS, "--heartbeat", "5"),
            *("--mpi-args=-x FAULT -x FAULT_FOLDER -x FAULT_PACE",),
            *training(*KEPT, *JSON),
        ],
        "the launcher gives the host up, and the job restarts on the other from its last "
        "checkpoint; the losses are the undisturbed ones, and the ledger is perfect",
        code=0,
        seconds=None,
        messages=(r"lab2 stands still: nothing of rank 2, 3 of 4 has run",),
        inside="report forward 2 7",
        strike=_stops_a_host,
        holds=undisturbed,
        leaves=OPEN_MPIS,
        variables={"FAULT_PACE": "0.3"},
    ),
    on_hosts(
        "all processes of a host stand still before MPI has started, --min-np 2, "
        f"--rank-timeout {SECONDS}",
        [
            *(*TWO, *WORDS, "--heartbeat", "5", "--mpi-args=-x FAULT_FOLDER"),
            *("sh", "-c", LATE, "sh", *training(*JSON, backend="mpi")),
        ],
        "the launcher gives the host up, and the job begins on the other; the losses are "
        "the undisturbed ones",
        code=0,
        seconds=None,
        messages=(r"lab2 stands still: nothing of rank 2, 3 of 4 has run",),
        strike=_stops_a_host_early,
        holds=as_undisturbed,
        backend="mpi",
        leaves=OPEN_MPIS,
    ),
]
