"""The variables of a model of which each rank of a tensor group has a shard.

A checkpoint has them whole. A new training, and what callbacks change, copies shards from
the first replica to the ranks with the same shard of other replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.variants.memory import partitioned
from collective.training.variants.memory.partitioned import PartitionedVariables
from collective.training.variants.memory.shards import Shard
from collective.training.variants.parallel.layers import TensorParallelLayer


def check(model: keras.Model, partitioned_before: bool) -> None:
    """Refuses, before the model is built, what a tensor group cannot train.

    Args:
        model: Compiled.
        partitioned_before: Whether an earlier training has partitioned the model.
    """
    partitioned.check_optimizer(model, "--tensor-parallel", partitioned_before)


class TensorParallelVariables(PartitionedVariables):
    """Shards of large layers, and of the optimizer's variables for them.

    Args:
        model: Built and compiled, but for its optimizer, which gets built here.
        backend: One with a tensor group.
    """

    def __init__(self, model: keras.Model, backend: Backend):
        assert backend.tensor is not None
        self.group = backend.tensor
        shards: dict[int, Shard] = {}
        for layer in model._flatten_layers():
            if isinstance(layer, TensorParallelLayer):
                shards |= layer.shards
        if not shards:
            raise UsageError(
                f"no layer of model {model.name!r} is split over the "
                f"{self.group.parts} ranks of --tensor-parallel",
                hint="take layers of collective.training.variants.parallel, made within "
                "backend.scope() or by a function given to collective.training.fit; "
                "--model transformer has some",
            )
        slots = keras_compat.build_optimizer(model.optimizer, model.trainable_variables)
        shards |= {id(slot): shards[id(v)] for slot, v in slots if id(v) in shards}
        super().__init__(model, backend, shards)

    def broadcast_shards(self) -> None:
        """Gives each rank the shards of the first replica; every rank calls it."""
        for variable in self._sharded:
            variable.assign(self.group.follow(np.asarray(variable)))

    def apply(self, gradients: Sequence[tf.Tensor], connected: Sequence[int]) -> None:
        """Inside ``run``: updates weights, whole ones and shards."""
        gradients, _ = self._exchange_norms(gradients, connected)
        variables = [self._trainable[i] for i in connected]
        keras_compat.apply(self.optimizer, gradients, variables, self.backend.assign)

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        keras_compat.finish(self.optimizer, self._trainable)

    def _counts_in_norm(self, index: int) -> bool:
        """Of a variable that all ranks of the group have whole, once a group."""
        return id(self._trainable[index]) in self._shards or self.group.part == 0

    def _sum_over_shards(self, numbers: tf.Tensor) -> tf.Tensor:
        return self.group.all_reduce(numbers)
