"""Variables of which each rank has a shard: gathered, cut, updated, and clipped by norm.

``collective.training.variants.memory.sharded_optimizer`` cuts the optimizer's variables,
``collective.training.variants.parallel`` those of large layers. Keras' optimizer updates a shard
as if it were a whole variable. That is right where the optimizer treats each element
alone. Where it does not (norms to clip by, the search for overflow of loss scaling), the
numbers are summed over the ranks here.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError, UsageError
from collective.training import keras_compat
from collective.training.variants.memory.shards import Shard

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
        model: Compiled.
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


class PartitionedVariables(ABC):
    """The variables of a model and its optimizer of which each rank has a shard.

    It keeps no reference to the model (``collective.training.prepared`` finds it by the
    model).

    Args:
        model: Built and compiled, its optimizer built for shards.
        backend: Connects the ranks.
        shards: By ``id`` of the variable.

    Attributes:
        scatters_gradients: Whether gradients are summed by ``reduce_scatter`` instead
            of an all-reduce.
    """

    scatters_gradients: ClassVar[bool] = False

    def __init__(
        self, model: keras.Model, backend: Backend, shards: Mapping[int, Shard]
    ):
        self.optimizer, self.backend = model.optimizer, backend
        self._shards = shards
        self._weights = list(model.weights)
        self._trainable = list(model.trainable_variables)
        every = [*model.variables, *self.optimizer.variables]
        self._sharded = [v for v in every if id(v) in shards]
        self._keras_clip = keras_compat.replace_clipping(self.optimizer, self._clip)
        self._norms = tf.zeros([0], tf.float64)

    def shape_of(self, variable: keras.Variable) -> tuple[int, ...] | None:
        """The whole shape of a variable of which ranks have shards; else None."""
        shard = self._shards.get(id(variable))
        return None if shard is None else shard.shape

    def cut(self, variable: keras.Variable, value: np.ndarray) -> Any:
        """What this rank's variable holds of a whole value."""
        shard = self._shards.get(id(variable))
        return value if shard is None else shard.cut(value)

    def gather(self) -> dict[int, np.ndarray]:
        """On rank 0 the sharded variables, whole, by ``id``. Every rank calls it."""
        found = {}
        for variable in self._sharded:
            whole = self._shards[id(variable)].gather(variable)
            if self.backend.rank == 0:
                found[id(variable)] = np.asarray(whole)
        return found

    def reduce_scatter(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Inside ``run``: this rank's shards of the sums over all replicas."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, gradients: Sequence[tf.Tensor], connected: Sequence[int]) -> None:
        """Inside ``run``: updates weights.

        Args:
            gradients: Divided by the global weight.
            connected: The index of each one's variable among the trainable ones.
        """

    def apply_whole(
        self, gradients: Sequence[tf.Tensor], connected: Sequence[int]
    ) -> None:
        """As ``apply``, of gradients that every rank has whole."""
        raise NotImplementedError

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

    @contextlib.contextmanager
    def unchanged(self, what: str) -> Iterator[None]:
        """Around code (``what``) that runs on rank 0 only, and so sees its shards only.

        Raises:
            CollectiveError: The code has changed a shard; other ranks cannot follow.
        """
        before = self._checksums()
        yield
        changed = [p for p, after in self._checksums().items() if before[p] != after]
        if changed:
            raise CollectiveError(
                f"{what} has changed {changed[0]!r}, of which each rank has a shard, on "
                "rank 0 only",
                hint="leave out what sets weights, as EarlyStopping's "
                "restore_best_weights; --checkpoint-dir has them whole",
                everywhere=False,
            )

    def _checksums(self) -> dict[str, bytes]:
        """A checksum of each of this rank's shards of weights."""
        return {
            v.path: tf.fingerprint(tf.reshape(v.value, [1, -1])).numpy().tobytes()
            for v in self._weights
            if id(v) in self._shards
        }

    @contextlib.contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Inside, variables have whole shapes: to read whole values from a file."""
        shapes = [(v, self._shards[id(v)].shape) for v in self._sharded]
        with keras_compat.replace_shapes(shapes):
            yield

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
            2 * tf.nn.l2_loss(g) if clips and self._counts_in_norm(i) else tf.zeros([])
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
        return [
            g * tf.cast(limit / tf.maximum(norm, limit), g.dtype)
            for g, norm in zip(gradients, norms, strict=True)
        ]


def overflow(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether an element of some gradient is not finite."""
    fine = [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    return tf.logical_not(tf.reduce_all(fine))


def unless(skipped: tf.Tensor, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The gradients; all NaN, which a LossScaleOptimizer skips, where it is true."""
    return [tf.where(skipped, tf.constant(math.nan, g.dtype), g) for g in gradients]
