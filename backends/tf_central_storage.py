"""One process, several devices, one copy: ``tf.distribute.CentralStorageStrategy``.

Sums: TensorFlow, in host memory.

Sharp bits: each step sends the weights to every device. ``scope`` changes how variables
assign, by a method from inside TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from collective.backends.devices import LocalDevicesOptions, local_devices
from collective.backends.tf_strategy import LocalStrategyBackend


class CentralStorageBackend(LocalStrategyBackend):
    """A replica on each device; all read one copy of the variables, in host memory.

    The devices' memory holds no optimizer state.
    """

    name = "tf-central-storage"
    summary = "one process, several devices, variables on the CPU (CentralStorage)"
    option_type = LocalDevicesOptions
    options: LocalDevicesOptions

    def _strategy(self) -> Any:
        import tensorflow as tf

        return tf.distribute.experimental.CentralStorageStrategy(
            local_devices(self.options.devices), parameter_device="/cpu:0"
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The strategy's scope. A variable takes the value that replica 0 writes.

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


def _first_writes(variable: Any, assign: Callable[..., Any], *args: Any, **how: Any):
    """Replaces ``AggregatingVariable._assign_func``, from inside TensorFlow.

    It waits for no other replica, so unlike the strategy's own it may be in a branch.
    """
    import tensorflow as tf

    if tf.distribute.in_cross_replica_context():
        return assign(*args, **how)
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    if tf.get_static_value(replica) != 0:
        return None
    return how.pop("f")(variable.get(), *args, **how)
