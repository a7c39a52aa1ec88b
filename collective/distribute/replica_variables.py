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
# Read before there are replicas, for example by a copy and by Keras.
_NOT_OF_REPLICAS = {
    "_values",
    "_primary",
    "_use_resource_variables",
    "_attribute_sentinel",
    "_distributed_container",
}
_READS = {"sparse_read", "gather_nd"}


class _Kept:
    """How ``tf.train.Checkpoint`` keeps a variable: by its value outside of replicas.

    The last two methods are needed because ``Checkpoint`` looks them up on the variable
    of the process' first replica if this class does not have them. A variable inside a
    Keras variable would then be kept as the value of that replica.
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
        """Read as TensorFlow does; ONLY_FIRST_REPLICA is the job's first replica."""
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
        """Read as ``ON_READ``; outside of a scope, in the strategy's own scope.

        Otherwise code that reads a variable outside of the scope, as Keras' files and
        ``model(x)`` do, would take the value of this process' first replica.
        """
        inside = tf.distribute.has_strategy()
        strategy = self._distribute_strategy
        with contextlib.nullcontext() if inside else strategy.scope():
            return super()._get()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the value outside of replicas, as ``numpy``."""
        return np.array(self.numpy(), dtype)

    def __getattr__(self, name: str) -> Any:
        """Get other attributes from this replica's own variable, without its value."""
        if name.startswith("_self_") or name in _NOT_OF_REPLICAS:
            raise AttributeError(name)
        if name in _READS and not _in_replica():
            raise AttributeError(name)  # TensorFlow reads the whole value instead
        return getattr(self._get_on_device_or_primary(), name)

    def value(self) -> Any:
        """Return this replica's value; outside of replicas, the mean."""
        return super().value() if _in_replica() else self._get()

    def average(self) -> None:
        """Give every replica the mean; every process calls it."""
        if self.written:
            self.assign(self._get_cross_replica())


def adapted(strategy: tf.distribute.Strategy, variable: tf.Variable) -> Any:
    """Return a new variable of TensorFlow, as a class of this module if needed."""
    if isinstance(variable, tf_internal.SyncOnReadVariable):
        return ReadTogether(strategy, variable.values, variable.aggregation)
    mirrored = isinstance(variable, tf_internal.MirroredVariable)
    own = mirrored and not variable.trainable
    if own and variable.aggregation == NONE and variable.dtype.is_floating:
        return WrittenByReplicas(strategy, variable.values, variable.aggregation)
    return variable


def _in_replica() -> bool:
    """Return whether a replica of a strategy runs; none does outside of a scope."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


@contextlib.contextmanager
def _named(extended: tf.distribute.StrategyExtended, what: str) -> Iterator[None]:
    """Add to an error of a collective which value it was to read."""
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
