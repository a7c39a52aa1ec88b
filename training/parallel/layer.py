"""What layers have in common whose weights are split over a tensor group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf

from collective.backends import tensor_group
from collective.backends.tensor_group import TensorGroup
from collective.errors import UsageError
from collective.training.memory.shards import AxisShard

# Regularizers whose penalty of the whole is the sum of the shards' penalties.
SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class TensorParallelLayer(keras.layers.Layer):
    """Mixed into a Keras layer: each rank has a shard of the weights in ``axes``.

    The layer takes the group of the backend in whose scope it is built. Without a group,
    it is the Keras layer that it is derived from.

    Attributes:
        axes: By name of a weight, the axis along which it is cut.
        group: The ranks that have the shards; None: weights are whole.
        shards: How each weight is cut, by ``id`` of its variable.
    """

    axes: ClassVar[dict[str, int]]
    group: TensorGroup | None = None
    shards: dict[int, AxisShard] = {}  # noqa: RUF012 - replaced, never changed

    def build(self, input_shape: Any = None) -> None:
        """Makes the weights, of those in ``axes`` this rank's shard."""
        self.group = tensor_group.current()
        if self.group is not None and (self.lora_rank or self.quantization_mode):
            self._refuse("is made with LoRA or quantization", "leave it out")
        super().build(input_shape)

    def add_weight(  # type: ignore[override]
        self,
        shape: Sequence[int],
        initializer: Any,
        name: str,
        regularizer: Any = None,
        constraint: Any = None,
        **more: Any,
    ) -> keras.Variable:
        """As of every layer. A shard has the values that it would have in the whole."""
        group = self.group
        if group is None or name not in self.axes:
            return super().add_weight(
                shape=shape,
                initializer=initializer,
                name=name,
                regularizer=regularizer,
                constraint=constraint,
                **more,
            )
        shard = AxisShard(shape, self.axes[name], group)
        length = shard.shape[shard.axis]
        if length < group.parts:
            self._refuse(
                f"has {name} of {length} along the axis that is cut",
                f"--tensor-parallel {length} or less",
            )
        if constraint is not None:
            self._refuse(f"has a constraint, which needs all of {name}", "drop it")
        if regularizer is not None:
            if not isinstance(regularizer, SUMS):
                self._refuse(
                    f"has a regularizer that is no sum over {name}",
                    "keras.regularizers.L1, L2 or L1L2",
                )
            regularizer = _summed(regularizer, group)

        def initialize(_: Any, dtype: Any = None, **__: Any) -> Any:
            # The whole is made in host memory, once, and freed.
            with tf.init_scope(), tf.device("/cpu:0"):
                return shard.cut(initializer(shard.shape, dtype=dtype))

        variable = super().add_weight(
            shape=shard.own_shape,
            initializer=initialize,
            name=name,
            regularizer=regularizer,
            **more,
        )
        self.shards = {**self.shards, id(variable): shard}
        return variable

    def _refuse(self, what: str, instead: str) -> None:
        raise UsageError(
            f"layer {self.name!r} {what}: with --tensor-parallel it cannot be",
            hint=instead,
        )


def _summed(regularizer: Any, group: TensorGroup) -> Callable[[Any], Any]:
    """The penalty of the whole, from a shard."""
    return lambda shard: group.reduce_from_tensor_parallel_region(regularizer(shard))
