"""Layers and models that are too large for one device: ``docs/how-to/parallel.md``."""

from collective.training.parallel.dense import ColumnParallelDense, RowParallelDense
from collective.training.parallel.embedding import ShardedEmbedding

__all__ = ["ColumnParallelDense", "RowParallelDense", "ShardedEmbedding"]
