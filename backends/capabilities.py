"""Abilities that only some backends have: one class each, with its own options.

A backend inherits from the classes of its abilities, and callers ask
``isinstance(backend, Elastic)``, or read the attribute that the class sets
(``backend.overlaps``).

    class                   options                 backends
    Elastic                 min_np, max_np          native, mpi
    SumsInBuckets           bucket_bytes            native, mpi, horovod, tf-multiworker
    TensorParallel          tensor_parallel         native, mpi
    OneDevice               none                    single, native, mpi
    ShardCollectives        none                    single, native, mpi, horovod, tf-multiworker
    InTurn                  none                    mpi, horovod
    MatchedByOrder          InTurn                  mpi
    SummedInGraph           none                    horovod, tf-multiworker
    Recording               none                    native
    Serving                 parameter_servers       tf-parameter-server
    LocalDevices            devices                 tf-mirrored, tf-central-storage, tf-tpu

An option given to a backend without the class is an error before anything starts
(``collective.backends.registry``).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from collective import deadline
from collective.backends.base import Backend
from collective.backends.devices import configure, gpus
from collective.backends.options import Options
from collective.buckets import BYTES_BETWEEN_HOSTS
from collective.environment import Environment, detect
from collective.errors import UsageError
from collective.log import log

if TYPE_CHECKING:
    import tensorflow as tf


class Elastic(Backend):
    """A backend whose ranks may change, if ``Options.min_np`` is set.

    When ranks die, collectives raise errors for which ``lost`` is true, and every rank
    that is left calls ``regroup``. The same call admits ranks that wait to join, and
    follows ``leave`` on another rank.
    """

    takes = frozenset({"min_np", "max_np"})
    # Every rank calls this first after each ``regroup``. It may use collectives, and
    # ``regroup`` raises its errors. None: nothing is called.
    on_change: Callable[[], None] | None = None
    # Whether ``regroup`` admits ranks that wait to join; the first rank's counts.
    admits = True

    def __init__(self, options: Options, environment: Environment | None = None):
        environment = environment or detect()
        if (options.min_np or 1) > environment.size:
            raise UsageError(
                f"min_np={options.min_np}, and the number of ranks is "
                f"{environment.size}",
                hint=f"min_np={environment.size} or less",
            )
        super().__init__(options, environment)
        self.joins = environment.joining
        self.elastic = options.min_np is not None
        self._max_replicas = options.max_np
        self._place_variable: Any = None

    @property
    def most_replicas(self) -> int:
        """Return the highest number of replicas that the job may have."""
        return self._max_replicas or self.replicas

    def replica(self) -> int | tf.Tensor:
        """Return this replica's number; in an elastic job, by a variable."""
        return self._place()[0] if self.elastic else super().replica()

    def replica_count(self) -> int | tf.Tensor:
        """Return the number of replicas; in an elastic job, by a variable."""
        return self._place()[1] if self.elastic else super().replica_count()

    def _place(self) -> Any:
        import tensorflow as tf

        if self._place_variable is None:  # a traced function must see it change
            with tf.init_scope(), tf.device("CPU"):
                self._place_variable = tf.Variable(
                    [self.rank, self.size], trainable=False, dtype=tf.int64
                )
        return self._place_variable.read_value()

    @abstractmethod
    def lost(self, error: BaseException) -> bool:
        """Return whether the error means only that ranks died, and others can continue.

        If so, every rank that is left calls ``regroup``.
        """

    def is_repeated(self, error: BaseException) -> bool:
        """Return whether a caller repeats the work that this error has interrupted.

        That is so after a loss. The error may have been raised from one for which
        ``lost`` is true.
        """
        return self.on_change is not None and self.caused_by_loss(error)

    def caused_by_loss(self, error: BaseException) -> bool:
        """Return whether an error, or one that it was raised from, is ``lost``."""
        found: BaseException | None = error
        while found is not None:
            if self.lost(found):
                return True
            found = found.__cause__ or found.__context__
        return False

    def regroup(self) -> list[int]:
        """Continue with the ranks that are left, renumbered in their old order.

        Ranks that wait to join come after them, if the backend can admit them.

        Returns:
            The former number of each rank, by its new one; -1 for a rank that joined.
        """
        former = self._regroup()
        while self.on_change is not None:
            try:
                self.on_change()
                break
            except Exception as error:
                if not self.lost(error):
                    raise
            former = [rank if rank < 0 else former[rank] for rank in self._regroup()]
        return former

    @abstractmethod
    def _regroup(self) -> list[int]:
        """Do the work of ``regroup``, except ``on_change``."""

    def enter(self) -> list[int]:
        """Join the job that already runs, if this process ``joins`` one.

        Returns:
            As ``regroup``.
        """
        raise NotImplementedError

    @abstractmethod
    def leave(self) -> None:
        """Leave a job whose other ranks have agreed to continue without this one."""

    def _renumber(self, place: Environment) -> None:
        """Take a new place in the job."""
        self._max_replicas = self.most_replicas
        self._take_place(place)
        if self._place_variable is not None:
            self._place_variable.assign([place.rank, place.size])


class SumsInBuckets(Backend):
    """Sums gradients in buckets, each as soon as back-propagation has made it."""

    takes = frozenset({"bucket_bytes"})

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        # The size of a bucket; None: one bucket, after all gradients.
        self.bucket_bytes = options.bucket_bytes
        if self.bucket_bytes is None:
            self.bucket_bytes = self._default_bucket_bytes()
        self.overlaps = self.bucket_bytes is not None

    def _default_bucket_bytes(self) -> int | None:
        return BYTES_BETWEEN_HOSTS if self.size != self.local_size else None


class TensorParallel(Backend):
    """A backend whose ranks may cut weights: ``Options.tensor_parallel`` of them share rows.

    The backend itself sums over all ranks. A model is cut when it is made
    (``collective.training.preparation.parts``).
    """

    takes = frozenset({"tensor_parallel"})

    def __init__(self, options: Options, environment: Environment | None = None):
        parts = options.tensor_parallel
        if parts != 1 and (options.min_np, options.max_np) != (None, None):
            raise UsageError(
                "with a rank that dies, its part of the weights is lost",
                hint="without min_np, continuing from a checkpoint; or without "
                "tensor_parallel",
            )
        if not isinstance(parts, int) or parts < 1:
            raise UsageError(
                f"tensor_parallel={parts!r} is not a number of ranks",
                hint="tensor_parallel=2",
            )
        super().__init__(options, environment)
        if self.size % parts:
            raise UsageError(
                f"{self.size} ranks cannot be cut into groups of {parts} (tensor_parallel)",
                hint=f"a number of ranks that {parts} divides, as -np "
                f"{-(-self.size // parts) * parts}",
            )


class OneDevice(Backend):
    """Gives each process one device; sums are made in host memory."""

    def _configure_devices(self, environment: Environment) -> None:
        """Set up this process' device; a subclass calls this after it has started."""
        configure(self.options, environment, self.overlaps)
        if self.size > 1 and self.rank == 0 and gpus():
            log.warning(
                f"backend {self.name!r} sums in host memory: each step copies the "
                "gradients from the GPUs and back\nHINT: --backend tf-multiworker sums "
                "them on the GPUs (NCCL)"
            )


class LocalDevices(Backend):
    """A process with a replica on each of its devices.

    A partitioned step is one graph for all of them, outside of ``run``: it decides
    itself on which device each operation runs.

    Attributes:
        strategy: TensorFlow's, in whose scope the variables are made.
        devices: Their names, in the order of the replicas.
        between: Sums between the processes; None if there is one process.
    """

    strategy: tf.distribute.Strategy
    devices: Sequence[str]
    between: Backend | None = None
    _current: int | None = None  # set by ``on_each_device``

    def sum_devices(
        self, columns: Sequence[Sequence[tf.Tensor]]
    ) -> list[list[tf.Tensor]]:
        """Sum by the strategy's own operations, in a graph and outside of ``run``.

        Args:
            columns: For each device the tensors on it, of equal shapes on all.

        Returns:
            For each tensor, the sums on all devices; or one for all of them.
        """
        import tensorflow as tf
        from tensorflow.python.distribute.values import PerReplica

        rows = [PerReplica(parts) for parts in zip(*columns, strict=True)]
        where = self.strategy.extended.parameter_devices
        pairs = [(row, row if self.own_copies else where[0]) for row in rows]
        sums = self.strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        return [list(getattr(total, "values", (total,))) for total in sums]

    def on_each_device(self) -> Iterator[int]:
        """Yield the number of each replica of this process, outside of ``run``.

        Until the next number, operations are made on the device of that replica, and
        read its copy of a variable; ``replica`` returns its number.
        """
        import tensorflow as tf
        from tensorflow.python.distribute.distribute_lib import UpdateContext

        for place, device in enumerate(self.devices):
            self._current = self.local_replicas[place]
            # In a scope, in which its number alone says which copy is read.
            with self.strategy.scope(), UpdateContext(place), tf.device(device):
                yield self._current
        self._current = None

    def replica(self) -> int | tf.Tensor:
        """Return this replica's number, in ``run`` or in ``on_each_device``."""
        return super().replica() if self._current is None else self._current


class ShardCollectives(Backend):
    """Reduce-scatter and all-gather, for state of which each replica holds one shard.

    For backends with one replica in each process. The collectives here are made from an
    all-reduce, which sends more than is needed; a subclass overrides them if it has
    better ones.
    """

    exchanges: ClassVar[bool] = False  # whether it has ``all_to_all``, too

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """Return this replica's row of the sum over all replicas, inside ``run``.

        Args:
            rows: ``[replicas, n]``, of equal shape and dtype on every replica.

        Returns:
            ``[n]``.
        """
        self.require_all_ranks()
        return self._reduce_scatter(rows) if self.replicas > 1 else rows[0]

    def _reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        return self._all_reduce([rows])[0][self.replica()]

    def all_gather(self, row: tf.Tensor) -> tf.Tensor:
        """Return the rows of all replicas, inside ``run``.

        Args:
            row: ``[n]``, of equal shape and dtype on every replica.

        Returns:
            ``[replicas, n]``.
        """
        self.require_all_ranks()
        return self._all_gather(row) if self.replicas > 1 else row[None]

    def _all_gather(self, row: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        shape = [self.replicas, *row.shape]
        rows = tf.scatter_nd([[self.replica()]], row[None], shape)
        return self._all_reduce([rows])[0]

    def all_to_all(self, rows: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        """Send rows to each replica and return those sent to this one, inside ``run``.

        Args:
            rows: ``[replicas, counts[replica], n]``: as many rows as that replica
                receives.
            counts: The number of rows for each replica; the same on all.

        Returns:
            ``[sum(counts), n]``, in the order of the replicas.
        """
        import tensorflow as tf

        self.require_all_ranks()
        received = self._all_to_all(rows, counts)
        return tf.ensure_shape(received, [sum(counts), rows.shape[-1]])

    def _all_to_all(self, rows: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        raise NotImplementedError

    def gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the rows of all processes in the order of the ranks, inside ``run``.

        Args:
            tensor: ``[rows, ...]``; only ``rows`` may differ between processes.

        Returns:
            ``[sum of rows, ...]``.
        """
        self.require_all_ranks()
        return self._gather_rows(tensor) if self.size > 1 else tensor

    def _gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Add each rank's rows to zeros, in their place."""
        import tensorflow as tf

        rows = tf.shape(tensor, tf.int64)[0]
        own = tf.one_hot(self.rank, self.size, rows, tf.zeros_like(rows))
        (counts,) = self._all_reduce([own])
        before, after = (
            tf.reduce_sum(part)
            for part in (counts[: self.rank], counts[self.rank + 1 :])
        )
        around = [[before, after], *[[0, 0]] * (tensor.shape.rank - 1)]
        return self._all_reduce([tf.pad(tensor, around)])[0]


class SummedInGraph(Backend):
    """A backend whose collectives run in TensorFlow's graph, and so cannot be watched.

    So each call of the graph counts as a wait for the other ranks. It may take
    ``COLLECTIVE_TIMEOUT`` and twice as long as the longest call before.
    """

    _longest = 0.0  # seconds of a call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call a ``tf.function`` that uses ``run``, as ``Backend.call``, in time."""
        begin = time.monotonic()
        with deadline.waiting("in a step or its collectives", 2 * self._longest):
            result = super().call(*args, **kwargs)
        self._longest = max(self._longest, time.monotonic() - begin)
        return result


class InTurn(Backend):
    """A backend whose collectives in a graph must run one after the other.

    Otherwise TensorFlow would begin a loop's next iteration before the last collective
    of this one has ended.
    """


class MatchedByOrder(InTurn):
    """A backend whose collectives match by their order: ranks must agree on it."""

    @abstractmethod
    def match(self, what: str) -> None:
        """Compare the next calls of the ranks; every rank calls this.

        Raises:
            CollectiveError: On every rank, if the calls differ; it names each rank's
                call.
        """


@dataclass(frozen=True)
class Collective:
    """A collective that this process ran; times in seconds of ``time.perf_counter``."""

    begin: float
    end: float
    bytes: int  # of its tensors together


class Recording(Backend):
    """Records collectives while it is switched on."""

    @abstractmethod
    def record(self, on: bool) -> None:
        """Start or stop recording this process' collectives."""

    @abstractmethod
    def recorded(self) -> list[Collective]:
        """Return the collectives recorded since the last call, in order."""


class Serving(Backend):
    """Asynchronous: rank 0 hands batches to workers and waits for none of them."""

    takes = frozenset({"parameter_servers"})
    synchronous = False
    workers: int  # number of ranks that compute gradients

    @abstractmethod
    def serve(self) -> None:
        """Serve until the job ends, and end the process; on all but the chief."""

    @abstractmethod
    def join(self) -> None:
        """Wait for all calls that are under way."""
