"""A chief, workers and servers: ``tf.distribute.ParameterServerStrategy``, asynchronous.

Rank 0 is the chief: it has the data, hands batches to whichever worker is free, and
waits for none of them. The next ranks are workers; the last ones hold the variables.
Each update is one worker's batch, applied to what the variables are by then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.backends import addresses
from collective.backends.base import Availability, Backend, Options
from collective.backends.devices import configure
from collective.backends.parameter_server.server import Bell, Task, serve
from collective.backends.quiet import is_quiet
from collective.backends.tf_strategy import StrategyBackend
from collective.environment import Environment, cores_per_process, detect
from collective.errors import CollectiveError, UsageError

SHARD_BYTES = 256 << 10  # variables of two such parts or more are cut [TensorFlow]
AHEAD = 2  # batches handed out for each worker
SECONDS = 10  # for the rank of a server that died to tell of it


class ParameterServerBackend(StrategyBackend):
    """Workers that train without waiting for each other.

    Only the chief runs the training's code, as one process with one replica; on the
    other ranks ``serve``, or ``scope``, does not return.

    Attributes:
        workers: Their number.
    """

    name = "tf-parameter-server"
    launcher = "mpirun"
    summary = "a chief, workers and servers, asynchronous (ParameterServerStrategy)"
    own_options = ("parameter_servers",)
    synchronous = False

    def __init__(self, options: Options, environment: Environment | None = None):
        environment = environment or detect()
        super().__init__(options, environment)
        servers = options.parameter_servers or 1
        self.workers = workers = self.size - 1 - servers
        if workers < 1:
            raise UsageError(
                f"{self.size} ranks are a chief, {servers} parameter "
                f"server{'s' * (servers > 1)} and no worker",
                hint=f"mpirun -np {servers + 2} python train.py --backend {self.name} "
                f"--parameter-servers {servers}",
            )
        os.environ["GRPC_FAIL_FAST"] = "use_caller"  # who is dead is told at once
        world = addresses.world(environment)
        tasks = addresses.exchange(environment, world)
        bell = addresses.exchange(environment, world)[0]
        addresses.leave(environment)
        cluster = {
            "chief": tasks[:1],
            "worker": tasks[1 : 1 + workers],
            "ps": tasks[1 + workers :],
        }
        if self.rank:
            job = "worker" if self.rank <= workers else "ps"
            index = self.rank - 1 - (workers if job == "ps" else 0)
            threads = options.threads or cores_per_process(environment)
            self.task = Task(cluster, job, index, threads, environment)
            self.bell_at = bell
            return
        # From here on the chief, one process with one replica as far as a step sees.
        self.size = self.replicas = 1
        self.local_replicas = range(1)
        self._under_way: deque[_Scheduled] = deque()
        self.bell = Bell(bell, environment.size - 1)
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
            ),
            tf.distribute.experimental.partitioners.MinSizePartitioner(
                SHARD_BYTES, max_shards=servers
            ),
        )
        _read_as_arrays()
        _leave_errors_to_the_steps()
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable on three ranks or more that can exchange addresses."""
        if environment.launched and environment.size < 3:
            return Availability(
                False,
                f"{environment.size} ranks are no chief, worker and server",
                f"mpirun -np 3 python train.py --backend {cls.name}",
            )
        found = addresses.availability(environment)
        if not found.usable and not environment.launched:
            hint = f"mpirun -np 5 python train.py --backend {cls.name}"
            return Availability(False, found.reason, hint)
        return found

    @classmethod
    def ranks(cls, replicas: int) -> int:
        """A chief and a server besides."""
        return replicas + 2

    def serve(self) -> None:
        """On all ranks but the chief: serves until it is gone, and ends the process."""
        if self.rank == 0:
            return
        try:
            serve(self.task, self.bell_at)
        except CollectiveError as error:
            print(f"rank {self.rank}: error: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)
        sys.exit(0)

    def scope(self) -> Any:
        """On the chief, the strategy's; variables made in it are on the servers."""
        self.serve()
        return super().scope()

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        explain: Callable[[Exception], Exception] = lambda error: error,
    ) -> Any:
        """Hands the call to a worker; waits only where enough are under way."""
        while len(self._under_way) >= AHEAD * self.workers:
            self._under_way.popleft().fetch()
        try:
            value = self.coordinator.schedule(function, args)
        except Exception as error:
            raise _explained(error, explain) from None
        scheduled = _Scheduled(value, explain)
        self._under_way.append(scheduled)
        return scheduled

    def assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Writes: there is one copy, and one replica."""
        Backend.assign(self, variables, values)


def _leave_errors_to_the_steps() -> None:
    """Keeps a traceback off the screen when TensorFlow's threads stumble.

    Where a server dies, what they were doing fails, and so does the step that waits
    for it, which tells; now and then the thread falls over its own bookkeeping, too.
    """
    tell = threading.excepthook

    def hook(error: threading.ExceptHookArgs) -> None:
        if error.thread is None or "ProcessingLoop-" not in error.thread.name:
            tell(error)

    threading.excepthook = hook


def _read_as_arrays() -> None:
    """Lets Keras read a partitioned variable as it reads any other."""
    import tensorflow as tf
    from tensorflow.python.distribute.sharded_variable import ShardedVariable

    def whole(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(tf.convert_to_tensor(self), dtype)

    ShardedVariable.__array__ = ShardedVariable.numpy = whole


class _Scheduled:
    """What a worker will return: a vector, and perhaps more that nobody asks for."""

    def __init__(self, value: Any, explain: Callable[[Exception], Exception]):
        self._value, self._explain = value, explain
        self._fetched: Any = None

    def fetch(self) -> Any:
        """Waits for it."""
        if self._value is not None:
            try:
                self._fetched = self._value.fetch()
            except Exception as error:
                raise _explained(error, self._explain) from None
            self._value = None
        return self._fetched

    def numpy(self) -> np.ndarray:
        """Waits for it, as for a tensor."""
        return self.fetch()


def _explained(error: Exception, explain: Callable[[Exception], Exception]):
    import tensorflow as tf

    if not isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
        return explain(error)
    time.sleep(SECONDS)
    return CollectiveError(
        f"a server of the cluster does not answer: {str(error).splitlines()[0]}",
        hint="start the job again; with --checkpoint-dir DIR --resume it goes on from "
        "the last checkpoint",
    )
