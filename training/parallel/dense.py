"""Dense layers cut by columns or by rows, for one that is too large for a device.

A column-parallel layer and a row-parallel one after it need one sum of activations
forward and one backward; in between, each rank has its share of the units.

Source: M. Shoeybi et al., Megatron-LM, 2019.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from collective.backends import tensor_group
from collective.training.parallel.layer import TensorParallelLayer

# Activations that need all units of a row.
ACROSS_UNITS = {"softmax", "log_softmax", "sparsemax", "glu"}


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
        """Makes this rank's shards of kernel and bias."""
        super().build(input_shape)
        name = getattr(self.activation, "__name__", "")
        if self.group is None:
            return
        if self.units % self.group.parts:
            self._refuse(
                f"has {self.units} units, which {self.group.parts} ranks do not divide",
                f"units that {self.group.parts} divides",
            )
        if not self.gather_output and (
            name in ACROSS_UNITS or self.activity_regularizer
        ):
            what = name if name in ACROSS_UNITS else "an activity_regularizer"
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
        """All units or this rank's."""
        parts = 1 if self.group is None or self.gather_output else self.group.parts
        return (*input_shape[:-1], self.units // parts)

    def get_config(self) -> dict[str, Any]:
        """As of ``Dense``."""
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
        """Makes this rank's shard of the kernel, and the whole bias."""
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
        own = (
            inputs
            if self.input_is_parallel
            else self.group.scatter_to_tensor_parallel_region(inputs)
        )
        x = self.group.reduce_from_tensor_parallel_region(ops.matmul(own, self.kernel))
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)

    def get_config(self) -> dict[str, Any]:
        """As of ``Dense``."""
        return super().get_config() | {"input_is_parallel": self.input_is_parallel}
