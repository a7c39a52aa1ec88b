"""The interface between the training step and whatever sums its gradients.

A backend knows processes, devices and sums; it knows no model and no data set. The
step talks to it only through this class and cannot tell which one it has.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from collective import recorder
from collective.buckets import BYTES_BETWEEN_HOSTS
from collective.environment import Environment, detect
from collective.errors import CollectiveError

if TYPE_CHECKING:
    from collective.backends.tensor_group import TensorGroup


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used here.

    Attributes:
        usable: True when it can.
        reason: Why it can or cannot, in a few words.
        hint: The line to type to make it usable; empty when it is.
    """

    usable: bool
    reason: str
    hint: str = ""


@dataclass(frozen=True)
class Options:
    """What a user may choose about a backend.

    Attributes:
        devices: Number of local devices (in-process backends only); where there
            are fewer GPUs than this, logical CPU devices. None: the GPUs, or 2.
        threads: Threads for TensorFlow's operations; None: this process' share of
            the cores.
        cross_device_ops: ``auto``, ``nccl``, ``hierarchical-copy`` or
            ``reduction-to-one-device`` (tf-mirrored).
        communication: ``auto``, ``ring`` or ``nccl`` (tf-multiworker).
        algorithm: Of the all-reduce, as for ``collective.allreduce`` (native).
        transport_dtype: ``float16`` or ``bfloat16``: what float32 gradients of 1024
            elements or more are on the way (native). None: what they are.
        bucket_bytes: Sums the gradients in buckets of about so many bytes, the first
            while the rest is computed (native, horovod). By default buckets of 4 MiB between
            hosts, and one for all on one host.
        parameter_servers: Ranks that hold variables (tf-parameter-server). None: one.
        min_np: Goes on without ranks that die while so many are left (native, mpi).
            None: what the launcher was told; where it was not, the job ends.
        max_np: How many ranks there may ever be (native, mpi). None: what the launcher was
            told; where it was not, none come later.
        tensor_parallel: Ranks that hold one replica together (native); see
            ``collective.backends.tensor_group``.
        model_parallel: Devices of each process over which a model's layers are placed
            (single, native, mpi); where there are fewer GPUs, logical CPU devices.
    """

    devices: int | None = None
    threads: int | None = None
    cross_device_ops: str = "auto"
    communication: str = "auto"
    algorithm: str = "auto"
    transport_dtype: str | None = None
    bucket_bytes: int | None = None
    parameter_servers: int | None = None
    min_np: int | None = None
    max_np: int | None = None
    tensor_parallel: int = 1
    model_parallel: int = 1


@dataclass(frozen=True)
class Collective:
    """A collective that this process ran.

    Attributes:
        begin, end: When, in seconds of ``time.perf_counter``.
        bytes: Of its tensors.
    """

    begin: float
    end: float
    bytes: int


class Backend(ABC):
    """One way to sum gradients over the replicas of a job.

    A *process* is what a launcher starts; a *replica* computes gradients. Process
    backends have one replica in each of ``size`` processes; in-process backends
    have one process with several replicas.

    Attributes:
        name: What the user types behind ``--backend``.
        summary: One line for ``--list-backends``.
        launcher: What best starts its ranks; empty for a backend of one process.
        rank, size: This process and the number of processes.
        local_rank, local_size: The same within this host.
        replicas: Number of replicas in the job.
        local_replicas: Which of them live in this process, in order.
        chosen_because: Why this backend was chosen, for the summary.
        predicted: By backend that ``auto`` chose from, fastest first: seconds of a
            step's all-reduce. Empty where it measured nothing, or was not asked.
        own_options: Names of the ``Options`` that other backends refuse.
        joins: Whether this process comes to a job that runs, and is not in it yet:
            until ``enter`` it is alone.
        called: The number that it was started with; no other process of the job has it.
        one_replica: Whether there is never more than one replica.
        tensor: The ranks that hold one replica together; None: each has its own.
        stages: Devices of this process over which the layers of its replica are placed;
            none: all on the default device.
        synchronous: Whether all replicas share each batch; if not, each of ``workers``
            trains on batches of its own, and a step sees one replica.
        processes: That the launcher started; ``size`` of them run the training's code.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    launcher: ClassVar[str] = ""
    own_options: ClassVar[tuple[str, ...]] = ()
    one_replica: ClassVar[bool] = False
    synchronous: ClassVar[bool] = True

    def __init__(self, options: Options, environment: Environment | None = None):
        environment = environment or detect()
        self.joins, self.called = environment.joining, environment.rank
        environment = environment.current
        self.options = options
        self.rank, self.size = environment.rank, environment.size
        self.local_rank = environment.local_rank
        self.local_size = environment.local_size
        self.processes = self.replicas = self.size
        self.local_replicas = range(self.rank, self.rank + 1)
        self.tensor: TensorGroup | None = None
        self.stages: list[str] = []
        self._bucket_bytes = options.bucket_bytes
        sends_early = (
            "bucket_bytes" in self.own_options and self.size != self.local_size
        )
        if sends_early and options.bucket_bytes is None:
            self._bucket_bytes = BYTES_BETWEEN_HOSTS
        self._number: Any = None
        self._most = options.max_np
        self.chosen_because = "asked for"
        self.predicted: dict[str, float] = {}
        self._guarded_by: str | None = None

    @classmethod
    @abstractmethod
    def availability(cls, environment: Environment) -> Availability:
        """Says whether this backend works here. Never raises, starts nothing."""

    @classmethod
    def ranks(cls, replicas: int) -> int:
        """How many processes to start for so many replicas."""
        return replicas

    def serve(self) -> None:
        """On a rank that only serves others: does so, and ends the process."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which model and optimizer must be built."""
        if self.tensor is not None:
            return self.tensor.for_layers()
        if self.stages:  # made in the host's memory, then placed
            import tensorflow as tf

            return tf.device("/cpu:0")
        return contextlib.nullcontext()

    def run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Calls ``step(*args)`` for every local replica; first replica's result.

        Used inside a ``tf.function``.
        """
        return step(*args)

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        explain: Callable[[Exception], Exception] = lambda error: error,
    ) -> Any:
        """Calls a ``tf.function`` that uses ``run``.

        Args:
            function: Returns a vector, or that and more.
            args: Tensors.
            explain: Makes of an error what is raised.

        Returns:
            What it returns; or, where it is not synchronous, what has a method
            ``numpy`` that waits for the vector.
        """
        try:
            return function(*args)
        except Exception as error:
            raise explain(error) from None

    def replica(self) -> Any:
        """Inside ``run``: the number of this replica in the job, an int or tensor."""
        if self.options.min_np is None:
            return self.local_replicas[0]
        import tensorflow as tf

        if self._number is None:  # what is traced must follow when it changes
            with tf.init_scope(), tf.device("CPU"):
                self._number = tf.Variable(self.rank, trainable=False, dtype=tf.int64)
        return self._number.read_value()

    @property
    def most_replicas(self) -> int:
        """How many replicas there may be: places for what each one tells."""
        return self._most or self.replicas

    def all_reduce(
        self, tensors: Sequence[Any], rounded: Sequence[int] = ()
    ) -> list[Any]:
        """Inside ``run``: the sum of each tensor over all replicas.

        Args:
            tensors: Dense tensors of equal shapes and dtypes on every replica.
            rounded: Places of those that ``Options.transport_dtype`` is for: the
                gradients. All others are counts, or end as such, and are summed as
                they are.

        Returns:
            The sums, in order, the same bits on every replica.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        self.require_all_ranks()
        return self._all_reduce(list(tensors))

    @property
    def overlaps(self) -> bool:
        """Whether ``all_reduce`` sums the first tensors before the last are there."""
        return self._bucket_bytes is not None

    @abstractmethod
    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        """What ``all_reduce`` does once the call is known to be safe."""

    def sum_over_processes(self, tensors: Sequence[Any]) -> list[Any]:
        """As ``all_reduce``, over processes: where several hold a replica, over each."""
        return self.all_reduce(tensors)

    def reduce_scatter(self, rows: Any) -> Any:
        """Inside ``run``: this replica's row of the sum over all replicas.

        Args:
            rows: ``[replicas, n]``, of equal shape and dtype on every replica.

        Returns:
            ``[n]``.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        self.require_all_ranks()
        return self._reduce_scatter(rows) if self.replicas > 1 else rows[0]

    def _reduce_scatter(self, rows: Any) -> Any:
        """By an all-reduce, where a backend has nothing better."""
        return self._all_reduce([rows])[0][self.replica()]

    def all_gather(self, row: Any) -> Any:
        """Inside ``run``: the rows of all replicas.

        Args:
            row: ``[n]``, of equal shape and dtype on every replica.

        Returns:
            ``[replicas, n]``.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        self.require_all_ranks()
        return self._all_gather(row) if self.replicas > 1 else row[None]

    def _all_gather(self, row: Any) -> Any:
        """By an all-reduce, where a backend has nothing better."""
        import tensorflow as tf

        shape = [self.replicas, *row.shape]
        return self._all_reduce([tf.scatter_nd([[self.replica()]], row[None], shape)])[
            0
        ]

    def assign(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Inside ``run``: writes values, the same on each replica, to variables."""
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Outside ``run``: gives every process rank 0's values of the variables."""
        if self.size == 1:
            return
        for variable in variables:
            variable.assign(self.broadcast_array(np.asarray(variable)))

    def broadcast_array(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Outside ``run``: the root's array, on every process. Shapes must agree.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        self.require_all_ranks()
        with recorder.span(recorder.BROADCAST, "by the backend", array.nbytes):
            return self._broadcast_array(array, root)

    def _broadcast_array(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """What ``broadcast_array`` does once the call is known to be safe."""
        return array

    def barrier(self) -> None:
        """Waits until every process is here.

        Raises:
            CollectiveError: Where only one rank would take part.
        """
        self.require_all_ranks()
        with recorder.span(recorder.BARRIER, "by the backend"):
            self._barrier()

    def _barrier(self) -> None:
        """What ``barrier`` does once the call is known to be safe."""
        self._broadcast_array(np.zeros(1, np.float32))

    def record(self, on: bool) -> None:
        """Begins or ends to record this process' collectives, where that is known."""

    def recorded(self) -> list[Collective]:
        """The collectives recorded since the last call, in order; may be none."""
        return []

    def close(self) -> None:
        """Ends what the backend started. The process may go on without it."""

    def abort(self, exit_code: int) -> None:
        """Ends the whole job from one rank, so that no other waits for it."""

    def ended_by_another(self, error: BaseException) -> int | None:
        """The exit code of the rank that ended the job, if that is all an error says.

        None for an error of this rank's own.
        """
        return None

    def lost(self, error: BaseException) -> bool:
        """Whether all that an error says is that ranks died, and the others can go on.

        Then all of these call ``regroup``.
        """
        return False

    def regroup(self) -> list[int]:
        """Goes on with the ranks that are left, numbered anew in their old order.

        Those who wait to come in follow behind, where the backend can take them.

        Returns:
            By rank, what number it had before; -1: it was not there.
        """
        raise NotImplementedError

    def enter(self) -> list[int]:
        """Comes into the job that runs, where this process ``joins`` one.

        Returns:
            As ``regroup``.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Leaves a job whose other ranks have agreed to go on without this one."""
        raise NotImplementedError

    def _renumber(self, place: Environment) -> None:
        """Takes a new place."""
        self._most = self.most_replicas
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.replicas = place.size
        self.local_replicas = range(place.rank, place.rank + 1)
        if self._number is not None:
            self._number.assign(place.rank)

    def require_all_ranks(self) -> None:
        """For collectives: raises inside code that runs on rank 0 only.

        Raises:
            CollectiveError: There; the other ranks would not take part.
        """
        if self._guarded_by:
            raise CollectiveError(
                f"a collective was called from {self._guarded_by}, "
                "which runs on rank 0 only; the other ranks would wait for ever",
                hint="call it on every rank, outside callbacks",
                everywhere=False,
            )

    @contextlib.contextmanager
    def only_rank_zero(self, what: str) -> Iterator[None]:
        """Makes collectives raise at once inside code that runs on rank 0 only.

        Args:
            what: The code, as the error should name it.
        """
        self._guarded_by = what if self.size > 1 else None
        try:
            yield
        finally:
            self._guarded_by = None
