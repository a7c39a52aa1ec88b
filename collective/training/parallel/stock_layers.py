"""``Dense`` and ``Embedding`` of a script, split over a tensor group where they are built.

To Keras they stay what they are: their configuration and their file are those of the
stock layer. The caller chooses how one is split before it is built.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from collective.training import keras_compat
from collective.training.keras_compat import entry_points
from collective.training.parallel.layers import (
    ColumnParallelDense,
    RowParallelDense,
    ShardedEmbedding,
    TensorParallelLayer,
)

DENSE, EMBEDDING = keras.layers.Dense, keras.layers.Embedding
# By the stock layer and the axis of its matrix that is cut.
_KINDS: dict[tuple[type[Any], int], type[Any]] = {}


def split(layer: keras.layers.Layer, axis: int) -> None:
    """Has a stock layer that is not built yet split its matrix along an axis.

    Args:
        layer: A ``Dense`` or an ``Embedding``, of exactly this class.
        axis: 0: the rows of the matrix, inputs of ``Dense`` and words of ``Embedding``.
            1: its columns, the outputs.
    """
    object.__setattr__(layer, "__class__", _KINDS[type(layer), axis])


class _StockLayer(TensorParallelLayer):
    """What a parallel layer needs to pass for the stock layer; mixed in first."""

    gather_output, input_is_parallel = True, False  # values are whole between layers

    def load_own_variables(self, store: Any) -> None:
        """Takes this rank's shards of the whole weights in a file of the stock layer."""
        if self.group is None:  # the variables are whole
            super().load_own_variables(store)
            return
        cut = [(v, self.shards[id(v)]) for v in self.weights if id(v) in self.shards]

        def blank() -> dict[int, np.ndarray]:
            return {id(v): np.zeros(s.shape, np.asarray(v).dtype) for v, s in cut}

        shapes = [(v, shard.shape) for v, shard in cut]
        with keras_compat.whole_variables.whole_variables(shapes, blank) as whole:
            super().load_own_variables(store)
            written = whole.written()
        for variable, shard in cut:
            if id(variable) in written:
                variable.assign(shard.cut(written[id(variable)]))

    def enable_lora(self, *_: Any, **__: Any) -> None:
        """Refused, once the layer is split."""
        self._refuse("gets LoRA or quantization", "leave it out")

    quantize = enable_lora


class _ColumnEmbedding(TensorParallelLayer, keras.layers.Embedding):
    """``Embedding``, with the elements of its vectors split over the ranks."""

    axes = {"embeddings": 1}  # noqa: RUF012

    def build(self, input_shape: Any = None) -> None:
        """Makes this rank's columns of the table."""
        super().build(input_shape)
        if self.group is not None and self.output_dim % self.group.parts:
            self._refuse(
                f"has vectors of {self.output_dim}, which {self.group.parts} ranks do not "
                "divide",
                f"an output_dim that {self.group.parts} divides",
            )

    def call(self, inputs: Any) -> Any:
        """Ids ``[...]`` to vectors ``[..., output_dim]``."""
        found = super().call(inputs)
        if self.group is None:
            return found
        return self.group.gather_from_tensor_parallel_region(found)


def _register(stock: type[Any], axis: int, parallel: type[Any]) -> None:
    bases = (_StockLayer, parallel)
    kind = type(stock.__name__, bases, {"get_config": stock.get_config})
    entry_points.serialize_as(kind, stock)
    _KINDS[stock, axis] = kind


_register(DENSE, 0, RowParallelDense)
_register(DENSE, 1, ColumnParallelDense)
_register(EMBEDDING, 0, ShardedEmbedding)
_register(EMBEDDING, 1, _ColumnEmbedding)
