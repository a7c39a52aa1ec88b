"""Layers whose weights are split over a tensor group, for one too large for a device.

A column-parallel layer and a row-parallel one after it need one sum of activations
forward and one backward; in between, each rank has its share of the units.

Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import keras
import tensorflow as tf
from keras import ops

from collective.backends import tensor_group
from collective.backends.tensor_group import TensorGroup
from collective.errors import UsageError
from collective.training.input.plan import share
from collective.training.sharding.shards import AxisShard

# Regularizers whose penalty of the whole is the sum of the shards' penalties.
SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
# Activations that need all units of a row.
ACROSS_UNITS = {"softmax", "log_softmax", "sparsemax", "glu"}


class TensorParallelLayer(keras.layers.Layer):
    """Mixed into a Keras layer: each rank has a shard of the weights in ``axes``.

    The layer takes the group of the backend in whose scope it is built. Without a group,
    it is the Keras layer that it is derived from.

    Attributes:
        axes: By name of a weight, the axis along which it is cut.
        group: The ranks that have the shards. If None, weights are whole.
        shards: How each weight is cut, by ``id`` of its variable.
    """

    axes: ClassVar[dict[str, int]]
    group: TensorGroup | None = None
    shards: dict[int, AxisShard] = {}  # noqa: RUF012 - replaced, never changed

    def build(self, input_shape: Any = None) -> None:
        """Make the weights, of those in ``axes`` this rank's shard."""
        self.group = tensor_group.current()
        if self.group is not None and (self.lora_rank or self.quantization_mode):
            self._refuse("is made with LoRA or quantization", "leave it out")
        super().build(input_shape)

    def add_weight(
        self,
        shape: Sequence[int],
        initializer: Any,
        name: str,
        regularizer: Any = None,
        constraint: Any = None,
        **more: Any,
    ) -> keras.Variable:
        """See ``Layer.add_weight``. A shard has the values that the whole variable would have there."""
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
                    f"has a regularizer that is not a sum over {name}",
                    "keras.regularizers.L1, L2 or L1L2",
                )
            regularizer = _penalty_of_whole(regularizer, group)

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


def _penalty_of_whole(regularizer: Any, group: TensorGroup) -> Callable[[Any], Any]:
    return lambda shard: group.reduce_from_tensor_parallel_region(regularizer(shard))


@keras.saving.register_keras_serializable("collective")
class ColumnParallelDense(TensorParallelLayer, keras.layers.Dense):
    """``keras.layers.Dense``, with its units split over the ranks of a tensor group.

    Args:
        units: Over all ranks together.
        gather_output: Whether each rank gets all units. Otherwise each gets its own,
            for a ``RowParallelDense(..., input_is_parallel=True)``; in between may be
            only what treats each unit alone and draws no random numbers.
        arguments: As of ``Dense``.

    Raises:
        UsageError: In ``build``: the group does not divide ``units``, or an argument
            needs all units or all weights.
    """

    axes = {"kernel": 1, "bias": 0}  # noqa: RUF012

    def __init__(self, units: int, *, gather_output: bool = True, **arguments: Any):
        super().__init__(units, **arguments)
        self.gather_output = gather_output

    def build(self, input_shape: Any = None) -> None:
        """Make this rank's shards of kernel and bias."""
        super().build(input_shape)
        if self.group is None:
            return
        if self.units % self.group.parts:
            self._refuse(
                f"has {self.units} units, which {self.group.parts} ranks do not divide",
                f"units that {self.group.parts} divides",
            )
        what = getattr(self.activation, "__name__", "")
        if what not in ACROSS_UNITS:
            what = "an activity_regularizer" if self.activity_regularizer else ""
        if what and not self.gather_output:
            self._refuse(f"has {what}, which needs all units", "gather_output=True")

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """``[..., k]`` to ``[..., units]``, or to this rank's units."""
        if self.group is None:
            return super().call(inputs, training=training)
        x = ops.matmul(self.group.copy_to_tensor_parallel_region(inputs), self.kernel)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        if self.gather_output:
            x = self.group.gather_from_tensor_parallel_region(x)
        return x if self.activation is None else self.activation(x)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """Return the shape with all units, or with this rank's."""
        parts = 1 if self.group is None or self.gather_output else self.group.parts
        return (*input_shape[:-1], self.units // parts)

    def get_config(self) -> dict[str, Any]:
        """See ``Dense``."""
        return super().get_config() | {"gather_output": self.gather_output}


@keras.saving.register_keras_serializable("collective")
class RowParallelDense(TensorParallelLayer, keras.layers.Dense):
    """``keras.layers.Dense``, with its inputs split over the ranks of a tensor group.

    Args:
        units: Every rank has all of them.
        input_is_parallel: Whether inputs are this rank's share, as of
            ``ColumnParallelDense(..., gather_output=False)``; otherwise they are whole.
        arguments: As of ``Dense``.

    Raises:
        UsageError: In ``build``: the group does not divide the inputs, or an argument
            needs all weights.
    """

    axes = {"kernel": 0}  # noqa: RUF012

    def __init__(
        self, units: int, *, input_is_parallel: bool = False, **arguments: Any
    ):
        super().__init__(units, **arguments)
        self.input_is_parallel = input_is_parallel

    def build(self, input_shape: Any = None) -> None:
        """Make this rank's shard of the kernel, and the whole bias."""
        group = tensor_group.current()
        own = input_shape[-1]
        if group is not None and self.input_is_parallel:
            super().build((*input_shape[:-1], own * group.parts))
            self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: own})
            return
        super().build(input_shape)
        if group is not None and own % group.parts:
            self._refuse(
                f"has {own} inputs, which {group.parts} ranks do not divide",
                f"inputs that {group.parts} divides",
            )

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """``[..., k]``, or this rank's part of the last axis, to ``[..., units]``."""
        if self.group is None:
            return super().call(inputs, training=training)
        if not self.input_is_parallel:
            inputs = self.group.scatter_to_tensor_parallel_region(inputs)
        x = ops.matmul(inputs, self.kernel)
        x = self.group.reduce_from_tensor_parallel_region(x)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)

    def get_config(self) -> dict[str, Any]:
        """See ``Dense``."""
        return super().get_config() | {"input_is_parallel": self.input_is_parallel}


@keras.saving.register_keras_serializable("collective")
class ShardedEmbedding(TensorParallelLayer, keras.layers.Embedding):
    """``keras.layers.Embedding``, with its rows split over the ranks of a tensor group.

    All ranks of the group have the same ids. Each looks those of its own rows up; the sum
    over the group is the vectors of all. Backward, nothing is sent.

    Args:
        arguments: As of ``Embedding``. The group need not divide the rows.

    Raises:
        UsageError: In ``build``: an argument needs all rows.
    """

    axes = {"embeddings": 0}  # noqa: RUF012

    def call(self, inputs: Any) -> Any:
        """Ids ``[...]`` to vectors ``[..., output_dim]``."""
        if self.group is None:
            return super().call(inputs)
        ids = tf.cast(inputs, tf.int64)
        ids = tf.where(ids < 0, ids + self.input_dim, ids)  # as Keras counts
        parts, part = self.group.parts, self.group.part
        first, end = share(self.input_dim, part, parts)
        # An id out of range is one of the first or last rank, whose look-up then fails.
        mine = tf.fill(tf.shape(ids), True)
        if part:
            mine &= ids >= first
        if part < parts - 1:
            mine &= ids < end
        table = tf.convert_to_tensor(self.embeddings)
        found = tf.gather(table, tf.where(mine, ids - first, 0))
        found = tf.where(mine[..., None], found, 0)
        found = self.group.reduce_from_tensor_parallel_region(found)
        return tf.cast(found, self.compute_dtype)
