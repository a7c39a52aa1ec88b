"""Variables of which each rank has a shard: gathered, cut, updated, and clipped by norm.

``collective.training.variants.parallel`` cuts those of large layers. Keras' optimizer updates a
shard as if it were a whole variable. That is right where the optimizer treats each element
alone. Where it does not (norms to clip by, the search for overflow of loss scaling), the
numbers are summed over the ranks here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.sharding.shards import Shard
from collective.training.sharding.whole import ShardedVariables
from collective.training.step.found import Found
from collective.training.step.look_ups import values_of, with_values

# Those that treat each element alone. Not: Adafactor, Lamb and Muon.
ELEMENTWISE = {
    getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax"),
        *("Nadam", "Ftrl", "Lion"),
    )
}


def check_optimizer(model: keras.Model, option: str, partitioned: bool) -> None:
    """Refuses, before the model is built, an optimizer that cannot update shards.

    Args:
        option: The option that asks for shards.
        partitioned: Whether an earlier training has partitioned its variables already.
    """
    optimizer = keras_compat.core_optimizer(model.optimizer)
    if type(optimizer) not in ELEMENTWISE:
        names = sorted(kind.__name__ for kind in ELEMENTWISE)
        raise UsageError(
            f"optimizer {type(optimizer).__name__} is not known to treat each element "
            "of a variable alone, so it cannot be sharded",
            hint=f"drop {option}, or take one of {', '.join(names)}",
        )
    if optimizer.built and not partitioned:
        raise UsageError(
            "the optimizer has been built with whole variables already",
            hint="compile the model with a new optimizer before collective.training.fit",
        )


class PartitionedVariables(ShardedVariables, ABC):
    """The variables of a model and its optimizer of which each rank has a shard.

    It keeps no reference to the model (``collective.training.prepared`` finds it by the
    model).

    It is the ``Update`` of their training.

    Args:
        model: Built and compiled, its optimizer built for shards.
        shards: By ``id`` of the variable.
    """

    def __init__(
        self, model: keras.Model, backend: Backend, shards: Mapping[int, Shard]
    ):
        every = [*model.variables, *model.optimizer.variables]
        super().__init__(every, shards, backend)
        self.optimizer = model.optimizer
        self._weights = list(model.weights)
        self._trainable = list(model.trainable_variables)
        self._keras_clip = keras_compat.replace_clipping(self.optimizer, self._clip)
        self._norms = tf.zeros([0], tf.float64)

    def check(self, found: Found) -> None:
        """Refuses layers that set variables which this rank may hold a part of."""
        self._refuse(found.overwritten)

    def _refuse(self, indices: Sequence[int]) -> None:
        for i in indices:
            raise UsageError(
                f"a layer sets {self._trainable[i].path!r} itself, which this rank may "
                "hold a part of",
                hint="drop --tensor-parallel or --shard-optimizer",
            )

    @abstractmethod
    def apply(self, gradients: Sequence[tf.Tensor], connected: Sequence[int]) -> None:
        """Inside ``run``: updates weights.

        Args:
            gradients: Divided by the global weight.
            connected: The index of each one's variable among the trainable ones.
        """

    @abstractmethod
    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""

    @abstractmethod
    def _sum_over_shards(self, numbers: tf.Tensor) -> tf.Tensor:
        """Inside ``run``: the sum over the ranks with the shards of one whole."""

    def _counts_in_norm(self, index: int) -> bool:
        """Whether this rank's gradient of a trainable variable counts in the norm."""
        return True

    def broadcast_shards(self) -> None:
        """Copies shards that several ranks hold from the first to the others."""

    def count_parameters(self) -> int:
        """Numbers in the weights of the whole model."""
        return sum(math.prod(self.shape_of(v) or v.shape) for v in self._weights)

    def _exchange_norms(
        self, gradients: Sequence[tf.Tensor], connected: Sequence[int]
    ) -> tuple[Sequence[tf.Tensor], tf.Tensor | None]:
        """Inside ``run``: sums over ranks the norms for ``_clip``, and overflows.

        Returns:
            The gradients; all NaN where the LossScaleOptimizer of some rank must skip
            the update, so that every rank skips it. And whether that is so; None where
            there is no such optimizer.
        """
        core = keras_compat.core_optimizer(self.optimizer)
        scaled = keras_compat.expects_overflow(self.optimizer)
        clips = core.clipnorm or core.global_clipnorm
        if not scaled and not clips:
            return gradients, None
        numbers = [
            2 * tf.nn.l2_loss(values_of(g))
            if clips and self._counts_in_norm(i)
            else tf.zeros([])
            for i, g in zip(connected, gradients, strict=True)
        ]
        if scaled:
            numbers.append(tf.cast(overflow(gradients), tf.float64))
        total = self._sum_over_shards(
            tf.stack([tf.cast(n, tf.float64) for n in numbers])
        )
        scale = tf.cast(keras_compat.loss_scale(self.optimizer), tf.float64)
        self._norms = tf.sqrt(total[: len(gradients)]) / scale
        if not scaled:
            return gradients, None
        skipped = total[-1] > 0
        return unless(skipped, gradients), skipped

    def _clip(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Keras' clipping, by norms of whole gradients."""
        core = keras_compat.core_optimizer(self.optimizer)
        if core.clipnorm:
            norms = tf.unstack(self._norms)
        elif core.global_clipnorm:
            norms = [tf.norm(self._norms)] * len(gradients)
        else:
            return self._keras_clip(gradients)
        limit = core.clipnorm or core.global_clipnorm
        factors = [
            tf.cast(limit / tf.maximum(norm, limit), tf.float64) for norm in norms
        ]
        pairs = zip(gradients, factors, strict=True)
        if core.clipnorm:
            return [_times(*pair) for pair in pairs]
        # By the global norm, Keras adds look-ups up.
        return [_times(tf.convert_to_tensor(g), factor) for g, factor in pairs]


def overflow(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether an element of some gradient is not finite."""
    fine = [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    return tf.logical_not(tf.reduce_all(fine))


def unless(skipped: tf.Tensor, gradients: Sequence[Any]) -> list[Any]:
    """The gradients; all NaN, which a LossScaleOptimizer skips, where it is true."""

    def nan_if(values: tf.Tensor) -> tf.Tensor:
        return tf.where(skipped, tf.constant(math.nan, values.dtype), values)

    return [with_values(g, nan_if(values_of(g))) for g in gradients]


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    """A gradient, or each look-up in it, times a scalar."""
    values = values_of(gradient)
    return with_values(gradient, values * tf.cast(factor, values.dtype))
