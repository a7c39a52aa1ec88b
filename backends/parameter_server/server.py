"""A rank that serves: TensorFlow's server in a fork of it, watched until the job ends.

The fork can die without its rank, and so without the job: a launcher ends all ranks as
soon as one has ended. A worker's batch is given to another worker; a parameter server
that dies takes its shard of the model with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from collective.backends.devices import gpus
from collective.environment import Environment
from collective.errors import CollectiveError
from collective.log import log

TIMEOUT = 60  # seconds until all ranks have connected
GIVE_UP = (3, 60.0)  # deaths of a worker within so many seconds
Cluster = dict[str, list[str]]


@dataclass(frozen=True)
class Task:
    """What a rank serves.

    Attributes:
        cluster: ``host:port`` of every task, by job.
        job: ``worker`` or ``ps``.
        index: Which of that job.
        threads: For its operations.
        environment: The rank's place.
    """

    cluster: Cluster
    job: str
    index: int
    threads: int
    environment: Environment


def accept_ranks(address: str, ranks: int) -> list[socket.socket]:
    """On the chief, its connections to all ranks that serve it; they close when it ends.

    TensorFlow stops its servers late in that process, and would wait long
    for servers that have died.
    """
    connections: list[socket.socket] = []
    with socket.create_server(("", int(address.rsplit(":", 1)[1]))) as server:
        deadline = time.monotonic() + TIMEOUT
        while len(connections) < ranks:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connections.append(server.accept()[0])
            except TimeoutError:
                raise CollectiveError(
                    f"{ranks - len(connections)} of {ranks} servers did not start "
                    f"within {TIMEOUT} s",
                    hint="python -m collective.doctor",
                    everywhere=False,
                ) from None
    return connections


def serve(task: Task, chief: str) -> None:
    """Serves until the chief, which accepts ranks at this address, has ended.

    Raises:
        CollectiveError: A parameter server has died, or a worker too often.
    """
    server, deaths = _start(task), [0.0]
    try:
        with _connect(chief) as connection:
            while connection not in wait([connection, server.sentinel]):
                server.join()
                deaths.append(time.monotonic())
                _report_death(task, server.exitcode or 0, deaths)
                server = _start(task)
    finally:
        server.kill()
        server.join()


def _report_death(task: Task, code: int, deaths: list[float]) -> None:
    """Logs the death of a server; raises where the job cannot continue."""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    if task.job == "ps":
        raise CollectiveError(
            f"parameter server {task.index} {how}, and its part of the model is lost",
            hint="start the job again; with a checkpoint that it resumes from, it "
            "continues there",
            everywhere=False,
        )
    number, seconds = GIVE_UP
    if len(deaths) > number and deaths[-1] - deaths[-number] < seconds:
        raise CollectiveError(
            f"worker {task.index} {how}, the {number}rd time within {seconds:.0f} s",
            hint="TF_CPP_MIN_LOG_LEVEL=0 shows what it logs; if it is memory, "
            "accumulate=4",
            everywhere=False,
        )
    log.warning(
        "rank %d: worker %d %s; it is started again",
        task.environment.rank,
        task.index,
        how,
    )


def _connect(chief: str) -> socket.socket:
    host, port = chief.rsplit(":", 1)
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except OSError:
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"the chief does not answer at {chief}",
                    hint="python -m collective.doctor",
                    everywhere=False,
                ) from None
            time.sleep(0.1)


def _start(task: Task) -> ForkProcess:
    """Forks the server; waits until it listens, or is dead."""
    context = multiprocessing.get_context("fork")
    listening, listens = context.Pipe(duplex=False)
    server = context.Process(target=_be_server, args=(task, listens))
    server.start()
    listens.close()
    wait([listening])
    listening.close()
    return server


def _be_server(task: Task, listens: Connection) -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None

    def end_with_the_rank() -> None:
        rank.join()
        os._exit(0)

    threading.Thread(target=end_with_the_rank, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank handles it
    import tensorflow as tf

    # Each waits for other tasks, and holds a thread.
    waiting = len(task.cluster["worker"]) + 1
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=task.threads,
        inter_op_parallelism_threads=max(task.threads, waiting),
    )
    if task.job == "ps":
        config.device_count["GPU"] = 0
    elif gpus():
        mine = task.environment.local_rank % gpus()
        config.gpu_options.visible_device_list = str(mine)
        config.gpu_options.allow_growth = True
    server = tf.distribute.Server(
        task.cluster,
        job_name=task.job,
        task_index=task.index,
        protocol="grpc",
        config=config,
    )
    listens.close()
    server.join()
