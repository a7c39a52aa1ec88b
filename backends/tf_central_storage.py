"""One process, several devices, one copy: ``tf.distribute.CentralStorageStrategy``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from collective.backends.base import Options
from collective.backends.devices import local_devices
from collective.backends.tf_strategy import LocalStrategyBackend


class CentralStorageBackend(LocalStrategyBackend):
    """A replica on each device; all read one copy of the variables, in host memory.

    Memory of the devices holds no optimizer state; each step sends the weights to
    every device.
    """

    name = "tf-central-storage"
    summary = "one process, several devices, variables on the CPU (CentralStorage)"
    own_options = ("devices",)

    def _strategy(self, options: Options) -> Any:
        import tensorflow as tf

        return tf.distribute.experimental.CentralStorageStrategy(
            local_devices(options.devices), parameter_device="/cpu:0"
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The strategy's scope. Of what all replicas write, the first one's is taken.

        The strategy refuses to choose where a variable does not say how (those of
        Keras' optimizers do not); here every replica writes the same.
        """
        import tensorflow as tf

        def create(next_creator: Callable[..., Any], **how: Any) -> Any:
            variable = next_creator(**how)
            says = how.get("aggregation") or tf.VariableAggregation.NONE
            if self.replicas > 1 and says == tf.VariableAggregation.NONE:
                variable._assign_func = functools.partial(
                    _first_writes, variable, variable._assign_func
                )
            return variable

        with self.strategy.scope(), tf.variable_creator_scope(create):
            yield


def _first_writes(variable: Any, assign: Callable[..., Any], *args: Any, **how: Any):
    """Replaces ``AggregatingVariable._assign_func``, from inside TensorFlow.

    Waits for no other replica, so it can be in a branch, as a strategy's own cannot.
    """
    import tensorflow as tf

    if tf.distribute.in_cross_replica_context():
        return assign(*args, **how)
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    if tf.get_static_value(replica) != 0:
        return None
    return how.pop("f")(variable.get(), *args, **how)
