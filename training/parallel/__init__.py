"""Layers and models that are too large for one device: ``docs/parallel.md``."""

from training.parallel.dense import ColumnParallelDense, RowParallelDense
from training.parallel.embedding import ShardedEmbedding

__all__ = ["ColumnParallelDense", "RowParallelDense", "ShardedEmbedding"]
