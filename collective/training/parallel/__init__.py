"""Layers and models that are too large for one device: ``docs/how-to/parallel.md``.

Tensor parallelism splits ``layers`` over ranks, and ``tensor_parallel_variables`` updates
and gathers their shards. Model parallelism puts layers on the devices of one process:
``layer_placement``.
"""

from collective.training.parallel.layers import (
    ColumnParallelDense,
    RowParallelDense,
    ShardedEmbedding,
)

__all__ = ["ColumnParallelDense", "RowParallelDense", "ShardedEmbedding"]
