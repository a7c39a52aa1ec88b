"""A rank that serves: TensorFlow's server in a fork of it, watched until the job ends.

The fork can die without the rank, and so without the job: a launcher ends all ranks as
soon as one is gone. What a worker was doing is done again by another; a parameter
server takes its part of the model with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn

from collective.backends.devices import gpus
from collective.environment import Environment
from collective.errors import CollectiveError

PATIENCE = 60  # seconds for all ranks to have come
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


class Bell:
    """The chief's line to all that serve it. With the chief's process it is cut.

    TensorFlow's last words to its servers come late at the end of that process, and
    would wait long for servers that are gone.

    Args:
        address: ``host:port`` to listen at.
        ranks: That will come.

    Raises:
        CollectiveError: They did not.
    """

    def __init__(self, address: str, ranks: int):
        self.lines: list[socket.socket] = []
        with socket.create_server(("", int(address.rsplit(":", 1)[1]))) as server:
            deadline = time.monotonic() + PATIENCE
            while len(self.lines) < ranks:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    self.lines.append(server.accept()[0])
                except TimeoutError:
                    raise CollectiveError(
                        f"{ranks - len(self.lines)} of {ranks} servers did not start "
                        f"within {PATIENCE} s",
                        hint="python -m collective.doctor",
                        everywhere=False,
                    ) from None


def serve(task: Task, bell: str) -> None:
    """Serves until the chief is gone.

    Args:
        task: What to serve.
        bell: The address of the chief's ``Bell``.

    Raises:
        CollectiveError: A parameter server has died, or a worker again and again.
    """
    pid, deaths = _start(task), [0.0]
    try:
        with _call(bell) as line:
            while not select.select([line], [], [], 0.2)[0]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                pid = 0
                deaths.append(time.monotonic())
                _lost(task, os.waitstatus_to_exitcode(status), deaths)
                pid = _start(task)
    finally:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _lost(task: Task, code: int, deaths: list[float]) -> None:
    """Tells of a server that died; raises where the job cannot go on."""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    if task.job == "ps":
        raise CollectiveError(
            f"parameter server {task.index} {how}, and its part of the model is lost",
            hint="start the job again; with --checkpoint-dir DIR --resume it goes on "
            "from the last checkpoint",
            everywhere=False,
        )
    number, seconds = GIVE_UP
    if len(deaths) > number and deaths[-1] - deaths[-number] < seconds:
        raise CollectiveError(
            f"worker {task.index} {how}, the {number}rd time within {seconds:.0f} s",
            hint="TF_CPP_MIN_LOG_LEVEL=0 shows what it tells; if it is memory, "
            "--accumulate 4",
            everywhere=False,
        )
    print(
        f"rank {task.environment.rank}: worker {task.index} {how}; it is started again",
        file=sys.stderr,
        flush=True,
    )


def _call(bell: str) -> socket.socket:
    host, port = bell.rsplit(":", 1)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except OSError:
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"the chief does not answer at {bell}",
                    hint="python -m collective.doctor",
                    everywhere=False,
                ) from None
            time.sleep(0.1)


def _start(task: Task) -> int:
    """Forks the server; waits until it listens, or is dead.

    Returns:
        Its process.
    """
    alive, held = os.pipe()  # closes when this process is gone
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        os.close(ready)
        _be_server(task, alive, tell)
    os.close(alive)
    os.close(tell)
    with open(ready, "rb") as listening:
        listening.read(1)
    return pid


def _be_server(task: Task, alive: int, tell: int) -> NoReturn:
    def end_with_the_rank() -> None:
        os.read(alive, 1)
        os._exit(0)

    threading.Thread(target=end_with_the_rank, daemon=True).start()
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank's business
        import tensorflow as tf

        more = len(task.cluster["worker"]) + 1  # each waits for others, and holds one
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=task.threads,
            inter_op_parallelism_threads=max(task.threads, more),
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
        os.write(tell, b"1")
        os.close(tell)
        server.join()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
