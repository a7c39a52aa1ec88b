"""Layers and models that are too large for one device: ``docs/how-to/parallel.md``.

Tensor parallelism splits a layer over ranks: ``layer``, ``dense`` and ``embedding`` are
such layers, ``partition`` updates and gathers their shards. Model parallelism puts layers
on the devices of one process: ``placement``.
"""

from collective.training.parallel.dense import ColumnParallelDense, RowParallelDense
from collective.training.parallel.embedding import ShardedEmbedding

__all__ = ["ColumnParallelDense", "RowParallelDense", "ShardedEmbedding"]
