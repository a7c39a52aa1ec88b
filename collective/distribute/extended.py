"""``strategy.extended``: TensorFlow's for local devices, extended to all processes."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.distribute import datasets, replica_variables, tf_internal
from collective.distribute.cross_device_ops import MEAN, BackendCrossDeviceOps
from collective.distribute.one_replica import OneReplicaCalls
from collective.training.process.object_collectives import broadcast_object


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
    """The ranks as workers. No server listens at their addresses, which are names."""

    task_type: Any = None  # plain attributes in place of the base's properties
    task_id: Any = None

    def __init__(self, backend: Backend):
        self.task_type, self.task_id = "worker", backend.rank
        self._size = backend.size

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Return the names of all ranks: ``rank0:0``, ..."""
        names = [f"rank{rank}:0" for rank in range(self._size)]
        return tf.train.ClusterSpec({"worker": names})

    def master(self, *_: Any, **__: Any) -> str:
        """Return the empty string: there is no session."""
        return ""

    @property
    def environment(self) -> str:
        """Return an empty text, because TensorFlow has no name for this environment."""
        return ""

    def num_accelerators(self, *_: Any, **__: Any) -> dict[str, int]:
        """Return the number of GPUs of this process."""
        gpus = len(tf.config.list_logical_devices("GPU"))
        return {"GPU": gpus} if gpus else {}


class Extended(tf_internal.MirroredExtended):
    """One replica on each device of this process, and of the other processes.

    Args:
        backend: Runs the collectives across processes.
        one_host: Whether the program was written for the devices of one host.
    """

    def __init__(
        self, container: Any, backend: Backend, devices: Sequence[str], one_host: bool
    ):
        self.backend = backend
        self.exchange = BackendCrossDeviceOps(backend)
        # Whether a variable whose replicas differ is read without the other processes,
        # because they do not take part in the present call.
        self.reads_locally = False
        self._is_one_replica = False
        self._one_host = one_host
        super().__init__(
            container, devices=list(devices), cross_device_ops=self.exchange
        )
        self._cluster_resolver = Resolver(backend)
        self._one_replica = OneReplicaCalls(self)
        # By name, shape and number among these, in the order of their creation.
        self._written: dict[tuple[Any, ...], weakref.ref[Any]] = {}
        self._made: Counter[tuple[Any, ...]] = Counter()

    # --- how many, and which ----------------------------------------------------------

    @property
    def _num_replicas_in_sync(self) -> int:
        if self._is_one_replica:
            return 1
        return self.backend.size * len(self._devices)

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self.backend.rank * len(self._devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self.backend.rank * len(self._devices)

    def _in_multi_worker_mode(self) -> bool:
        return self.backend.size > 1

    @property
    def should_checkpoint(self) -> bool:
        """Return whether this process writes checkpoints: only rank 0 does."""
        return bool(self.backend.rank == 0)

    @property
    def should_save_summary(self) -> bool:
        """Return whether this process writes summaries: only rank 0 does."""
        return self.should_checkpoint

    # --- variables --------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        strategy = self._container_strategy()
        variable = replica_variables.adapted(strategy, variable)
        if isinstance(
            variable,
            replica_variables.WrittenByReplicas | replica_variables.ReadTogether,
        ):
            self.keep_written(variable)
        return variable

    def keep_written(self, variable: tf.Variable) -> None:
        """Add a variable that replicas write; all processes do so in one order."""
        kind = variable.name, tuple(variable.shape)
        self._made[kind] += 1
        key = *kind, self._made[kind]
        self._written[key] = weakref.ref(variable)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        """Return rank 0's first value; a process' other devices copy its first's."""
        stock = super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
        if replica_id or self.backend.size == 1 or self._is_one_replica:
            return stock  # within ``as_one_replica``, fit and evaluate broadcast it

        def first_value() -> tf.Tensor:
            value = stock() if callable(stock) else stock
            value = getattr(value, "wrapped_value", value)  # of a checkpoint
            value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            return self.exchange.from_rank_zero(value)

        return first_value

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast ONLY_FIRST_REPLICA from the first replica of the job.

        TensorFlow takes the first of each process. The count of an optimizer's steps is
        not sent: it goes up by one everywhere, and a collective for it at each step
        would have no effect.
        """
        if self.backend.size > 1 and not _counts_steps(destinations):
            # The dtype of a number is the variable's.
            dtype = getattr(destinations, "dtype", None)
            value = tf.convert_to_tensor(tensor, dtype)
            tensor = self.exchange.from_rank_zero(value)
        return super()._broadcast_to(tensor, destinations)

    def read_var(self, replica_local_var: Any) -> Any:
        """Return the value outside of replicas, as checkpoints keep it."""
        if isinstance(replica_local_var, replica_variables.WrittenByReplicas):
            return replica_local_var._get_cross_replica()
        return super().read_var(replica_local_var)

    def _live(self, kind: type[Any]) -> list[Any]:
        """Return live variables of a kind that replicas write, in order of creation.

        Every process calls it, and gets the same variables: those that exist on all.
        Python may have collected an unused model on some processes only, and a program
        may copy one on rank 0.
        """
        alive = {
            key: variable
            for key, reference in self._written.items()
            if (variable := reference()) is not None
        }
        self._written = {key: self._written[key] for key in alive}
        wanted = broadcast_object(self.backend, list(alive))
        if not wanted:
            return []
        present = tf.constant([key in alive for key in wanted], tf.int32)
        (holders,) = self.exchange.sum([present])
        of_all = [
            alive[key]
            for key, count in zip(wanted, holders.numpy(), strict=True)
            if count == self.backend.size
        ]
        return [variable for variable in of_all if isinstance(variable, kind)]

    def average_written(self) -> None:
        """Make variables that replicas write equal on all; every process calls it."""
        for variable in self._live(replica_variables.WrittenByReplicas):
            variable.average()

    @contextlib.contextmanager
    def as_one_replica(self) -> Iterator[None]:
        """Let each process run code for one process inside; all processes enter it.

        There is one replica, and its component of a variable is the value over all.
        """
        together = self._live(replica_variables.ReadTogether)
        for variable in together:
            variable.values[0].assign(variable.read_value())
        self._is_one_replica = True
        try:
            yield
        finally:
            self._is_one_replica = False
            for variable in together:
                variable.assign(variable.values[0].read_value())

    @contextlib.contextmanager
    def reading_first(self) -> Iterator[None]:
        """Let the first component of a variable be its value inside; all processes enter it.

        So each process has the whole value of a variable that is a sum over replicas.
        """
        for variable in self._live(replica_variables.ReadTogether):
            variable.values[0].assign(variable.read_value())
        with self.reading_locally():
            yield
        for variable in self._live(replica_variables.ReadTogether):
            variable.assign(variable.values[0].read_value())

    @contextlib.contextmanager
    def reading_locally(self) -> Iterator[None]:
        """Let rank 0 alone read variables, after ``average_written``."""
        before, self.reads_locally = self.reads_locally, True
        try:
            yield
        finally:
            self.reads_locally = before

    # --- reductions -------------------------------------------------------------------

    def _use_merge_call(self) -> bool:
        return True

    def _get_cross_device_ops(self, value: Any) -> BackendCrossDeviceOps:
        return self.exchange

    def _reduce_to(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value: Any,
        destinations: Any,
        options: Any,
    ) -> Any:
        if tf_internal.is_mirrored(value):
            if reduce_op == MEAN:
                return value
            raise ValueError(
                "a value that is the same on all replicas cannot be summed over them: "
                f"{value}"
            )

        def one(part: Any) -> Any:
            spread = isinstance(part, tf_internal.DistributedValues)
            if not spread and self.backend.size == 1:
                return tf_internal.reduce_non_distributed_value(
                    reduce_op, part, destinations, len(self._devices)
                )
            return self.exchange.reduce(
                reduce_op, part, destinations=self._named(destinations)
            )

        if tf.nest.is_nested(value):
            return tf.nest.map_structure(one, value)
        return one(value)

    def _batch_reduce_to(
        self,
        reduce_op: tf.distribute.ReduceOp,
        value_destination_pairs: Any,
        options: Any,
    ) -> Any:
        pairs = [(value, self._named(to)) for value, to in value_destination_pairs]
        return self.exchange.batch_reduce(reduce_op, pairs, options)

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        return self.exchange._gather(
            value, destinations=self._named(destinations), axis=axis
        )

    def _named(self, destinations: Any) -> Any:
        """Name the device of a destination; an argument of a tf.function has none."""
        if isinstance(destinations, str) and not destinations:
            return self._devices[0]
        return destinations

    # --- running ----------------------------------------------------------------------

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if len(self._devices) > 1:
            return super()._call_for_each_replica(fn, args, kwargs)
        return self._one_replica.call(fn, args, kwargs or {})

    # --- data -------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return datasets.distribute_dataset(self, dataset, options)

    def _distribute_datasets_from_function(
        self, dataset_fn: Callable[..., Any], options: Any
    ) -> Any:
        return datasets.from_function(self, dataset_fn, options, self._one_host)

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable[..., Any]
    ) -> Any:
        context = tf.distribute.experimental.ValueContext
        numbers = map(self._get_replica_id_in_sync_group, range(len(self._devices)))
        total = self._num_replicas_in_sync
        values = [value_fn(context(number, total)) for number in numbers]
        return tf_internal.regroup(values, always_wrap=True)


def _counts_steps(variable: tf.Variable) -> bool:
    """Return whether a variable is ``iterations`` of a Keras optimizer."""
    shape, dtype = getattr(variable, "shape", None), getattr(variable, "dtype", None)
    if shape is None or shape.rank != 0 or dtype is None or not dtype.is_integer:
        return False
    return "iteration" in getattr(variable, "name", "").split("/")[-1]


@functools.cache
def look_on_all_replicas() -> None:
    """Make Keras' ``LossScaleOptimizer`` look for overflows on all replicas at once.

    Keras asks each process whether the gradients of its first replica are finite. If
    they are not finite on one rank only, that rank would skip the step, and the others
    would wait for its gradients. A second call does nothing.
    """
    kind = keras.optimizers.LossScaleOptimizer
    stock = kind.check_finite

    @functools.wraps(stock)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = stock(self, grads)
        extended = tf.distribute.get_strategy().extended
        if not isinstance(extended, Extended) or extended._num_replicas_in_sync == 1:
            return finite
        overflows = tf.cast(tf.logical_not(finite), tf.float32)
        context = tf.distribute.get_replica_context()
        return tf.equal(context.all_reduce("SUM", overflows), 0.0)

    kind.check_finite = check_finite
