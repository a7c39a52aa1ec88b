"""Backends made from a ``tf.distribute.Strategy``: the base, and one-process ones.

Sums: TensorFlow, between the devices of a process.

Sharp bits: the model must be made in ``backend.scope()``. All replicas share one Python
process, and TensorFlow's devices cannot be set up once it has started.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collective.backends.base import Availability, Backend, OneProcessBackend
from collective.backends.capabilities import LocalDevices
from collective.backends.devices import configure, gpus, local_devices
from collective.backends.options import Options
from collective.environment import Environment
from collective.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf

# Files of a TPU driver, up to v4 and from v5e on. A virtual machine's GPUs may have the
# latter.
CHIPS = ("/dev/accel0", "/dev/vfio/0")
TPU_HINT = (
    "on a Cloud TPU VM: pip install tensorflow-tpu; elsewhere: export TPU_NAME=..."
)


class StrategyBackend(Backend):
    """Runs the step under ``strategy.run``. Subclasses make the strategy."""

    strategy: tf.distribute.Strategy

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the strategy's scope: its variables have a copy on each device."""
        return self.strategy.scope()

    def run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run the step on each local replica; return the first one's result."""
        result = self.strategy.run(step, args=tuple(args))
        return self.strategy.experimental_local_results(result)[0]

    def replica(self) -> int | tf.Tensor:
        """Return this replica's number, from TensorFlow's replica context."""
        import tensorflow as tf

        return tf.distribute.get_replica_context().replica_id_in_sync_group

    def _all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        import tensorflow as tf

        context = tf.distribute.get_replica_context()
        try:
            return list(context.all_reduce(tf.distribute.ReduceOp.SUM, tensors))
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise UsageError(
                "the replicas of one process cannot sum in a branch (tf.cond), a loop "
                "(tf.while_loop) or a tf.function of their own",
                hint="sum outside of it; or a backend with one replica in each process, "
                "as native, mpi, tf-multiworker",
            ) from error

    def assign(
        self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]
    ) -> None:
        """Write each replica's value to its own copy; all values are the same.

        A plain ``assign`` would apply the variable's own aggregation (a mean, an error)
        to values that need none. If a variable is summed when it is read, as metrics'
        variables are, the first replica gets the value, and the others get zero.
        """
        import tensorflow as tf

        if not variables:
            return
        context = tf.distribute.get_replica_context()
        is_first = tf.equal(context.replica_id_in_sync_group, 0)
        values = [
            tf.where(is_first, value, tf.zeros_like(value))
            if hasattr(variable, "values")
            and variable.synchronization == tf.VariableSynchronization.ON_READ
            else value
            for variable, value in zip(variables, values, strict=True)
        ]

        def write(strategy: tf.distribute.Strategy, values: list[Any]) -> None:
            for variable, value in zip(variables, values, strict=True):
                strategy.extended.update(
                    variable, lambda v, x: v.assign(x), args=(value,), group=False
                )

        context.merge_call(write, args=(values,))


class LocalStrategyBackend(LocalDevices, OneProcessBackend, StrategyBackend):
    """A strategy of one process over its own devices. Subclasses make it."""

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        configure(options, Environment())
        self.strategy = self._strategy()
        self.replicas = self.strategy.num_replicas_in_sync
        self.local_replicas = range(self.replicas)
        self.devices = self.strategy.extended.worker_devices

    @abstractmethod
    def _strategy(self) -> tf.distribute.Strategy:
        """Return the strategy, over devices that TensorFlow has not touched yet."""

    @classmethod
    def _found(cls) -> str:
        return f"{gpus()} GPUs" if gpus() else "logical CPU devices"


class OneDeviceBackend(LocalStrategyBackend):
    """Like ``single``, within a strategy: on the first GPU, or the CPU."""

    name = "tf-one-device"
    summary = "one process on one device, within a strategy (OneDeviceStrategy)"
    one_replica = True

    def _strategy(self) -> tf.distribute.Strategy:
        import tensorflow as tf

        found = tf.config.list_physical_devices("GPU")
        return tf.distribute.OneDeviceStrategy("/gpu:0" if found else "/cpu:0")

    @classmethod
    def _found(cls) -> str:
        return "a GPU" if gpus() else "the CPU"


class MirroredBackend(LocalStrategyBackend):
    """A replica on each GPU, or on each of some logical CPU devices.

    Sums: TensorFlow's ``CrossDeviceOps``; between GPUs NCCL.
    """

    name = "tf-mirrored"
    summary = "one process, a replica on each local device (MirroredStrategy)"
    takes = frozenset({"devices", "cross_device_ops"})

    def _strategy(self) -> tf.distribute.Strategy:
        import tensorflow as tf

        devices = local_devices(self.options.devices)
        return tf.distribute.MirroredStrategy(
            devices, cross_device_ops=self._cross_device_ops(devices)
        )

    def _cross_device_ops(self, devices: list[str]) -> Any:
        import tensorflow as tf

        on_gpu = devices[0].startswith("/gpu")
        kinds = {
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical-copy": tf.distribute.HierarchicalCopyAllReduce,
            "reduction-to-one-device": tf.distribute.ReductionToOneDevice,
        }
        wanted = self.options.cross_device_ops
        if wanted == "auto":
            wanted = "nccl" if on_gpu else "reduction-to-one-device"
        if wanted == "nccl" and not on_gpu:
            raise UsageError(
                "NCCL needs GPUs, and the devices here are CPUs",
                hint="cross_device_ops='auto'",
            )
        if wanted not in kinds:
            raise UsageError(
                f"unknown cross-device ops {wanted!r}",
                hint=f"cross_device_ops: {' | '.join(['auto', *kinds])}",
            )
        return kinds[wanted]()


class CentralStorageBackend(LocalStrategyBackend):
    """A replica on each device; all read one copy of the variables, in host memory.

    Sharp bits: each step sends the weights to every device, whose memory holds no
    optimizer state. ``scope`` changes how variables assign, by a method from inside
    TensorFlow.
    """

    name = "tf-central-storage"
    summary = "one process, several devices, variables on the CPU (CentralStorage)"
    takes = frozenset({"devices"})
    own_copies = False

    def _strategy(self) -> tf.distribute.Strategy:
        import tensorflow as tf

        return tf.distribute.experimental.CentralStorageStrategy(
            local_devices(self.options.devices), parameter_device="/cpu:0"
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Return the strategy's scope, in which a variable takes replica 0's value.

        The strategy refuses to choose for a variable without an ``aggregation`` (those
        of Keras' optimizers have none); here every replica writes the same value.
        """
        import tensorflow as tf

        def create(next_creator: Callable[..., Any], **how: Any) -> Any:
            variable = next_creator(**how)
            aggregation = how.get("aggregation") or tf.VariableAggregation.NONE
            if self.replicas > 1 and aggregation == tf.VariableAggregation.NONE:
                variable._assign_func = functools.partial(
                    _first_writes, variable, variable._assign_func
                )
            return variable

        with self.strategy.scope(), tf.variable_creator_scope(create):
            yield


def _first_writes(
    variable: tf.Variable, assign: Callable[..., Any], *args: Any, **how: Any
) -> Any:
    """Replace ``AggregatingVariable._assign_func``, from inside TensorFlow.

    It waits for no other replica, so it may be in a branch, unlike the strategy's own.
    """
    import tensorflow as tf

    if tf.distribute.in_cross_replica_context():
        return assign(*args, **how)
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    if tf.get_static_value(replica) != 0:
        return None
    return how.pop("f")(variable.get(), *args, **how)


class TPUBackend(LocalStrategyBackend):
    """A replica on each core: of this machine's TPU, or of the one in ``TPU_NAME``.

    Sharp bits: never run on a TPU; tested as far as its code goes without one.
    """

    name = "tf-tpu"
    summary = "one process, a replica on each TPU core (TPUStrategy); never run on one"
    takes = frozenset({"devices"})
    own_copies = False  # there are some, but no step of a user's has run there

    def _strategy(self) -> tf.distribute.Strategy:
        import tensorflow as tf

        tpu = os.environ.get("TPU_NAME", "local")
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu)
            strategy = tf.distribute.TPUStrategy(resolver)
        except Exception as error:  # of TensorFlow and the network, many classes
            first = str(error).strip().split("\n")[0]
            raise UsageError(f"TPU {tpu!r}: {first}", hint=TPU_HINT) from error
        cores = strategy.num_replicas_in_sync
        if self.options.devices not in (None, cores):
            raise UsageError(
                f"devices={self.options.devices}: TPU {tpu!r} has {cores} cores",
                hint="leave devices out",
            )
        return strategy

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Read this machine's files; ask no network, which could take a minute."""
        if environment.size > 1:
            return super().availability(environment)
        if "TPU_NAME" in os.environ:
            return Availability(True, f"TPU_NAME is {os.environ['TPU_NAME']}")
        if not any(Path(chip).exists() for chip in CHIPS):
            return Availability(False, "there is no TPU", TPU_HINT)
        if importlib.util.find_spec("libtpu") is None:
            return Availability(False, "libtpu is not installed", TPU_HINT)
        return Availability(True, "a TPU in this machine")
