"""The sharded optimizer of a ``train_step``: it is given whole gradients.

The step sums its gradients where it takes them, and may clip or log them. What reaches the
optimizer is whole on every rank: each cuts its own shards out, updates these, and gathers
the weights (``collective.training.variants.memory.sharded_optimizer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import compatibility, keras_compat
from collective.training.prepared import PreparedModel
from collective.training.step.found import Found
from collective.training.traced import traced
from collective.training.variants.custom_step.replica import OrderedSums
from collective.training.variants.memory.sharded_optimizer import ShardedOptimizer


class WithoutUpdates(keras_compat.Hooks):
    """Has a step apply nothing by an optimizer that is to be built for shards."""

    def __init__(self, optimizer: keras.Optimizer):
        self.optimizer = optimizer

    def update(
        self, optimizer: keras.Optimizer, gradients: Any, variables: Any, apply: Any
    ) -> None:
        """Applies nothing."""
        check_optimizer(optimizer, self.optimizer)


class ShardedUpdate:
    """The update of a ``train_step`` by the shards of its prepared optimizer."""

    def __init__(self, prepared: PreparedModel, sums: OrderedSums):
        assert isinstance(prepared.partition, ShardedOptimizer)
        self.optimizer = prepared.model.optimizer
        self.shards = prepared.partition
        self.sums = sums
        trainable = map(keras_compat.tf_variable, prepared.trainable)
        self._indices = {id(v): i for i, v in enumerate(trainable)}
        self._function = traced(self._apply)
        overwritten = map(keras_compat.is_overwritten, prepared.trainable)
        self.shards.check(
            Found(overwritten=tuple(i for i, yes in enumerate(overwritten) if yes))
        )

    def __call__(
        self,
        optimizer: keras.Optimizer,
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> None:
        """In place of ``optimizer.apply``, which knows shards only."""
        check_optimizer(optimizer, self.optimizer)
        places = [self._indices.get(id(keras_compat.tf_variable(v))) for v in variables]
        if None in places:
            raise UsageError(
                "the train_step applies gradients to variables that are not trained "
                "ones of the model, or names none",
                hint="optimizer.apply(gradients, self.trainable_variables); or drop "
                "--shard-optimizer",
            )
        pairs = zip(gradients, places, strict=True)
        given = [(g, i) for g, i in pairs if g is not None]
        dense = [tf.convert_to_tensor(gradient) for gradient, _ in given]
        indices = tuple(i for _, i in given)
        self.sums.in_turn(dense, lambda: [self._function(dense, indices)])

    def _apply(self, gradients: list[tf.Tensor], indices: tuple[int, ...]) -> tf.Tensor:
        self.shards.apply_whole(gradients, indices)
        return tf.zeros([])


def check_optimizer(optimizer: keras.Optimizer, sharded: keras.Optimizer) -> None:
    """Refuses a step with another optimizer than the one that is sharded."""
    if optimizer is not sharded:
        raise UsageError(
            f"the train_step applies gradients by an optimizer {optimizer.name!r}, which "
            "is not that of model.compile(optimizer=...): that one is sharded, and no "
            "other",
            hint="drop --shard-optimizer; or "
            + compatibility.FEATURES["own_step"].without,
        )
