"""Variables whose processes may hold different values, and what reading them means.

TensorFlow's own classes serve for variables that are the same on all replicas. These
two are for the others:

*   ``ReadTogether``: ``ON_READ``, as those of metrics. Its value outside of
    ``strategy.run`` is the sum, the mean or the first of all replicas: a collective.
*   ``WrittenByReplicas``: of no aggregation, as the moving statistics of batch
    normalization. Each replica writes its own; outside of ``strategy.run`` the value is
    the mean over the replicas. The mean of moving averages is the moving average of the
    mean, so reading it, or writing it back, at any step gives the same later values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from collective.distribute import tf_internal
from collective.errors import CollectiveError

MEAN = tf.distribute.ReduceOp.MEAN
NONE = tf.VariableAggregation.NONE
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA
# Asked for before there are replicas, as by a copy and by Keras.
_NOT_OF_REPLICAS = {
    "_values",
    "_primary",
    "_use_resource_variables",
    "_attribute_sentinel",
    "_distributed_container",
}
_READS = {"sparse_read", "gather_nd"}


class _Kept:
    """How ``tf.train.Checkpoint`` keeps a variable: as its value outside of replicas.

    Without the last two, a variable that a Keras variable holds would be kept as the value
    of the first replica of the process that writes: they are looked up on that replica's
    own variable where this class has none.
    """

    written = False  # by a replica, in a function that was traced or has run

    def __deepcopy__(self: Any, memo: Any) -> Any:
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.written = self.written
        self._distribute_strategy.extended.keep_written(copied)
        return copied

    def _serialize_to_tensors(self: Any) -> dict[str, Any]:
        device = self._primary.device
        read = tf_internal.CheckpointTensor(
            self._get_cross_replica, dtype=self.dtype, device=device
        )
        return {tf_internal.VARIABLE_VALUE_KEY: read}

    def _restore_from_tensors(self: Any, restored: dict[str, Any]) -> Any:
        value = restored[tf_internal.VARIABLE_VALUE_KEY]
        return tf_internal.restore_each(self, value, self.aggregation)


class ReadTogether(_Kept, tf_internal.SyncOnReadVariable):
    """An ``ON_READ`` variable; all processes read it together."""

    def _get_cross_replica(self) -> Any:
        extended = self._distribute_strategy.extended
        if extended.reads_locally:
            return self._get_replica(0).read_value()
        with _named(extended, f"variable {self.name!r}"):
            if self._aggregation == FIRST:
                return extended.exchange.from_rank_zero(
                    self._get_replica(0).read_value()
                )
            return super()._get_cross_replica()

    def value(self) -> Any:
        """Reads as TensorFlow does; ONLY_FIRST_REPLICA is the first replica of the job."""
        if self._aggregation == FIRST and tf.distribute.in_cross_replica_context():
            return self._get_cross_replica()
        return super().value()


class WrittenByReplicas(_Kept, tf_internal.MirroredVariable):
    """A variable without aggregation that is not trained."""

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        self.written = True
        return super()._update_replica(update_fn, value, **kwargs)

    def _get_cross_replica(self) -> Any:
        extended = self._distribute_strategy.extended
        several = extended.exchange.backend.size * len(self.values) > 1
        if not self.written or extended.reads_locally or not several:
            return super()._get_cross_replica()
        with _named(extended, f"variable {self.name!r}"):
            parts = tf_internal.PerReplica(tuple(v.read_value() for v in self.values))
            return self._distribute_strategy.reduce(MEAN, parts, axis=None)

    def _get(self) -> Any:
        """Reads as TensorFlow's ``ON_READ``, in its strategy's scope where there is none.

        Otherwise what reads a variable outside of the scope, as Keras' files and
        ``model(x)`` do, would take the first replica of this process for the value.
        """
        inside = tf.distribute.has_strategy()
        strategy = self._distribute_strategy
        with contextlib.nullcontext() if inside else strategy.scope():
            return super()._get()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The value outside of replicas, as ``numpy``."""
        return np.array(self.numpy(), dtype)

    def __getattr__(self, name: str) -> Any:
        """What this class has not, of this replica's own variable: no value is read."""
        if name.startswith("_self_") or name in _NOT_OF_REPLICAS:
            raise AttributeError(name)
        if name in _READS and not _in_replica():
            raise AttributeError(name)  # TensorFlow reads the whole value instead
        return getattr(self._get_on_device_or_primary(), name)

    def value(self) -> Any:
        """This replica's; outside of replicas the mean."""
        return super().value() if _in_replica() else self._get()

    def average(self) -> None:
        """Gives every replica the mean; every process calls it."""
        if self.written:
            self.assign(self._get_cross_replica())


def adapted(strategy: Any, variable: Any) -> Any:
    """A new variable of TensorFlow's, as one of this module's where it needs to be."""
    if isinstance(variable, tf_internal.SyncOnReadVariable):
        return ReadTogether(strategy, variable.values, variable.aggregation)
    mirrored = isinstance(variable, tf_internal.MirroredVariable)
    own = mirrored and not variable.trainable
    if own and variable.aggregation == NONE and variable.dtype.is_floating:
        return WrittenByReplicas(strategy, variable.values, variable.aggregation)
    return variable


def _in_replica() -> bool:
    """Whether a replica of a strategy runs; none does outside of a scope."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


@contextlib.contextmanager
def _named(extended: Any, what: str) -> Iterator[None]:
    """Adds to the error of a collective what it was to read."""
    try:
        yield
    except (tf.errors.OpError, CollectiveError) as error:
        message = getattr(error, "message", str(error)).split("\nHINT")[0]
        raise CollectiveError(
            f"rank {extended.backend.rank} reads {what} of all replicas, and not every "
            f"rank does so: {message}",
            hint="the result of a metric, moving statistics and checkpoints are read by "
            "all ranks together: leave out `if rank == 0:` around result(), numpy(), "
            "save()",
            everywhere=False,
        ) from None
