"""A chief, workers and servers: ``tf.distribute.ParameterServerStrategy``, asynchronous.

Rank 0 is the chief: it has the data, hands batches to any worker that is free, and
waits for none of them. The next ranks are workers; the last ones hold the variables.

Sums: none. Each update is one worker's batch, applied to the present values of the
variables.

Sharp bits: two runs never give the same model. Only rank 0 runs the training's code. A
worker that dies is started again; a parameter server that dies ends the job. A rank
that serves runs TensorFlow's server in a fork, which can die without the rank, and so
without the job: a launcher ends all ranks as soon as one has ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TYPE_CHECKING, Any

from collective.backends import world
from collective.backends.base import Availability, Backend, script_command
from collective.backends.capabilities import Serving
from collective.backends.devices import configure, gpus
from collective.backends.options import Options
from collective.backends.quiet import is_quiet
from collective.backends.tf_strategy import StrategyBackend
from collective.environment import Environment, cores_per_process
from collective.errors import CollectiveError, UsageError
from collective.log import log
from collective.running_time import Deadline

if TYPE_CHECKING:
    import tensorflow as tf

AHEAD = 2  # batches handed out for each worker
SECONDS = 10  # in which the rank of a server that died reports it
TIMEOUT = 60  # seconds until all ranks have connected
_CONNECT_SECONDS = 5.0  # for one attempt
GIVE_UP = (3, 60.0)  # deaths of a worker within so many seconds


class ParameterServerBackend(StrategyBackend, Serving):
    """Workers that train without waiting for each other.

    Only the chief runs the training's code, as one process with one replica; on every
    other rank ``serve``, or ``scope``, does not return.
    """

    name = "tf-parameter-server"
    summary = "a chief, workers and servers, asynchronous (ParameterServerStrategy)"
    launcher = "collectiverun"
    extra_ranks = 2  # a chief and one server

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        environment = self.environment
        servers = options.parameter_servers or 1
        self.workers = workers = self.size - 1 - servers
        if workers < 1:
            raise UsageError(
                f"{self.size} ranks are a chief, {servers} parameter "
                f"server{'s' * (servers > 1)} and no worker",
                hint=f"{_starter(environment)} -np {servers + 2} {script_command()}, "
                f"with {servers} of parameter_servers",
            )
        os.environ["GRPC_FAIL_FAST"] = "use_caller"  # a dead server is an error at once
        ranks = world.connect(environment)
        tasks = world.exchange_addresses(environment, ranks)
        chief = world.exchange_addresses(environment, ranks)[0]
        world.end_world(ranks)
        cluster = {
            "chief": tasks[:1],
            "worker": tasks[1 : 1 + workers],
            "ps": tasks[1 + workers :],
        }
        if self.rank:
            job = "worker" if self.rank <= workers else "ps"
            index = self.rank - 1 - (workers if job == "ps" else 0)
            threads = options.threads or cores_per_process(environment)
            self.task = _Task(cluster, job, index, threads, environment)
            self.chief_address = chief
            return
        # From here on this is the chief: a step sees one process with one replica.
        self.size = self.replicas = 1
        self.local_replicas = range(1)
        self._under_way: deque[_Scheduled] = deque()
        self._ranks = _accept_ranks(chief, environment.size - 1)
        import tensorflow as tf

        if is_quiet():
            tf.get_logger().setLevel("FATAL")  # it logs each error that it raises
        tf.config.set_visible_devices([], "GPU")
        configure(options, environment)
        self.strategy = tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(cluster),
                rpc_layer="grpc",
                task_type="chief",
                task_id=0,
            )
        )
        _leave_errors_to_the_steps()
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Return whether it is usable: on three ranks or more with known addresses."""
        if environment.launched and environment.size < 3:
            return Availability(
                False,
                f"{environment.size} ranks are not a chief, worker and server",
                f"{_starter(environment)} -np 3 {script_command()}",
            )
        found = world.availability(environment)
        if not found.usable and not environment.launched:
            hint = f"mpirun -np 5 {script_command()}"
            return Availability(False, found.reason, hint)
        return found

    def serve(self) -> None:
        """Serve until the chief has ended, then end the process; not on the chief."""
        if self.rank == 0:
            return
        try:
            _serve(self.task, self.chief_address)
        except CollectiveError as error:
            print(f"rank {self.rank}: error: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)
        sys.exit(0)

    def scope(self) -> Any:
        """Return the chief's scope of the strategy; its variables are on servers."""
        self.serve()
        return super().scope()

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        explain: Callable[[Exception], Exception] = lambda error: error,
    ) -> Any:
        """Hand the call to a worker; wait only if enough calls are under way."""
        while len(self._under_way) >= AHEAD * self.workers:
            self._under_way.popleft().fetch()
        try:
            value = self.coordinator.schedule(function, args)
        except Exception as error:
            raise _explained(error, explain) from None
        scheduled = _Scheduled(value, explain)
        self._under_way.append(scheduled)
        return scheduled

    def join(self) -> None:
        """Wait for all calls that are under way."""
        while self._under_way:
            self._under_way.popleft().fetch()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Make an error say that a server has died."""
        try:
            yield
        except Exception as error:
            found = _explained(error, lambda error: error)
            if found is error:
                raise
            raise found from None

    def assign(
        self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]
    ) -> None:
        """Assign plainly: there is one copy, and one replica."""
        Backend.assign(self, variables, values)


def _starter(environment: Environment) -> str:
    """Return the launcher to type: the one that started this rank, if it takes -np."""
    ours = environment.launcher == "collectiverun"
    return "collectiverun" if ours else "mpirun"


def _leave_errors_to_the_steps() -> None:
    """Hide the tracebacks of TensorFlow's threads when a server dies.

    The step that waits for such a thread fails too, and reports the error; the thread's
    own traceback sometimes shows its bookkeeping only.
    """
    report = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if error.thread is None or "ProcessingLoop-" not in error.thread.name:
            report(error)

    threading.excepthook = hook


class _Scheduled:
    """A worker's future result, a tree of arrays; threads may read it."""

    def __init__(self, value: Any, explain: Callable[[Exception], Exception]):
        self._value, self._explain = value, explain

    def fetch(self) -> Any:
        """Wait for the value."""
        try:
            return self._value.fetch()
        except Exception as error:
            raise _explained(error, self._explain) from None


def _explained(
    error: Exception, explain: Callable[[Exception], Exception]
) -> Exception:
    import tensorflow as tf

    if not isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
        return explain(error)
    time.sleep(SECONDS)
    return CollectiveError(
        f"a server of the cluster does not answer: {str(error).splitlines()[0]}",
        hint="start the job again; with a checkpoint that it resumes from, it "
        "continues there",
    )


@dataclass(frozen=True)
class _Task:
    """The task of a rank that serves."""

    cluster: dict[str, list[str]]  # ``host:port`` of every task, by job
    job: str  # ``worker`` or ``ps``
    index: int  # number of the task in that job
    threads: int
    environment: Environment


def _accept_ranks(address: str, ranks: int) -> list[socket.socket]:
    """Accept the ranks that serve the chief; their connections close when it ends.

    TensorFlow stops its servers late in that process, and would wait long
    for servers that have died.
    """
    connections: list[socket.socket] = []
    with socket.create_server(("", int(address.rsplit(":", 1)[1]))) as server:
        deadline = Deadline(TIMEOUT)
        while len(connections) < ranks:
            server.settimeout(deadline.pause())
            try:
                connections.append(server.accept()[0])
            except TimeoutError:
                if not deadline.passed():
                    continue
                raise CollectiveError(
                    f"{ranks - len(connections)} of {ranks} servers did not start "
                    f"within {TIMEOUT} s",
                    hint="python -m collective.doctor",
                    everywhere=False,
                ) from None
    return connections


def _serve(task: _Task, chief: str) -> None:
    """Serve until the chief ends, which accepts ranks at this address.

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


def _report_death(task: _Task, code: int, deaths: list[float]) -> None:
    """Log the death of a server; raise if the job cannot continue."""
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
    deadline = Deadline(TIMEOUT, longest=_CONNECT_SECONDS)
    while True:
        try:
            link = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            link.settimeout(None)
            return link
        except OSError:
            if deadline.passed():
                raise CollectiveError(
                    f"the chief does not answer at {chief}",
                    hint="python -m collective.doctor",
                    everywhere=False,
                ) from None
            time.sleep(0.1)


def _start(task: _Task) -> ForkProcess:
    """Fork the server; wait until it listens, or is dead."""
    context = multiprocessing.get_context("fork")
    listening, listens = context.Pipe(duplex=False)
    server = context.Process(target=_be_server, args=(task, listens))
    server.start()
    listens.close()
    wait([listening])
    listening.close()
    return server


def _be_server(task: _Task, listens: Connection) -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None

    def end_with_the_rank() -> None:
        rank.join()
        os._exit(0)

    threading.Thread(target=end_with_the_rank, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank handles it
    import tensorflow as tf

    # Each thread waits for other tasks.
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
