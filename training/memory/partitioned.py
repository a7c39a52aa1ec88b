"""Variables of which each rank has a part: found, gathered, cut, and clipped by norm.

``collective.training.memory.sharded_optimizer`` cuts the optimizer's, ``collective.training.parallel`` those of large layers.
Keras' optimizer updates parts as if they were whole, which is right where it treats each
element alone. What it does not, the norms to clip by and the look for overflow of loss
scaling, is summed over the ranks here.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError, UsageError
from collective.training import keras_compat

# Those that treat each element alone. Not: Adafactor, Lamb and Muon.
BY_ELEMENT = {
    getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax"),
        *("Nadam", "Ftrl", "Lion"),
    )
}


def of(model: keras.Model) -> Parted | None:
    """What of a model and its optimizer each rank has a part of; None: of nothing."""
    return getattr(model.optimizer, "_parted", None)


def check_optimizer(model: keras.Model, option: str) -> None:
    """Refuses, before the model is built, an optimizer that cannot update parts.

    Raises:
        UsageError: It is not of ``BY_ELEMENT``, or has been built already.
    """
    optimizer = keras_compat.core_optimizer(model.optimizer)
    if type(optimizer) not in BY_ELEMENT:
        names = sorted(kind.__name__ for kind in BY_ELEMENT)
        raise UsageError(
            f"optimizer {type(optimizer).__name__} is not known to treat each element "
            "of a variable alone, so it cannot be sharded",
            hint=f"drop {option}, or take one of {', '.join(names)}",
        )
    if optimizer.built and of(model) is None:
        raise UsageError(
            "the optimizer has been built, whole, already",
            hint="compile the model with a new optimizer before collective.training.fit",
        )


class Parted(ABC):
    """Of a model and its optimizer, what each rank has a part of.

    Args:
        model: Built and compiled.
        backend: What the ranks talk through.
    """

    def __init__(self, model: keras.Model, backend: Backend):
        self.model, self.optimizer, self.backend = model, model.optimizer, backend
        self._clip = keras_compat.replace_clipping(self.optimizer, self._clipped)
        self._norms = tf.zeros([0], tf.float64)
        model.optimizer._parted = self

    @abstractmethod
    def shape_of(self, variable: keras.Variable) -> tuple[int, ...] | None:
        """The whole shape of a variable; None if it is whole."""

    @abstractmethod
    def part_of(self, variable: keras.Variable, value: np.ndarray) -> Any:
        """Of a whole value, what this rank's variable holds."""

    @abstractmethod
    def gather(self) -> dict[int, np.ndarray]:
        """The variables whole, by ``id``; every rank calls it, rank 0 gets it."""

    @abstractmethod
    def apply(self, gradients: Sequence[tf.Tensor], connected: Sequence[int]) -> None:
        """Inside ``run``: updates weights.

        Args:
            gradients: Divided by the global weight.
            connected: The number of each one's variable.
        """

    @abstractmethod
    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""

    @abstractmethod
    def _total(self, told: tf.Tensor) -> tf.Tensor:
        """Inside ``run``: the sum over the ranks that have the parts of one whole."""

    def _counts(self, number: int) -> bool:
        """Whether this rank's gradient of a variable counts in the norm of the whole."""
        return True

    def follow(self) -> None:
        """Makes alike what several ranks have the same part of; every rank calls it."""

    def parameters(self) -> int:
        """Numbers in the weights of the whole model."""
        weights = self.model.weights
        return sum(math.prod(self.shape_of(v) or v.shape) for v in weights)

    @contextlib.contextmanager
    def unchanged(self, what: str) -> Iterator[None]:
        """Around code that runs on rank 0 only, and so sees rank 0's parts only.

        Args:
            what: The code, as the error should name it.

        Raises:
            CollectiveError: It has changed some: the other ranks cannot follow.
        """
        before = self._marks()
        yield
        changed = next(
            (p for p, mark in self._marks().items() if before[p] != mark), ""
        )
        if changed:
            raise CollectiveError(
                f"{what} has changed {changed!r}, of which each rank has a part, on rank "
                "0 only",
                hint="leave out what sets weights, as EarlyStopping's "
                "restore_best_weights; --checkpoint-dir has them whole",
                everywhere=False,
            )

    def _marks(self) -> dict[str, bytes]:
        """A checksum of each of this rank's parts of weights."""
        parts = [v for v in self.model.weights if self.shape_of(v) is not None]
        return {
            v.path: tf.fingerprint(tf.reshape(v.value, [1, -1])).numpy().tobytes()
            for v in parts
        }

    @contextlib.contextmanager
    def as_whole(self) -> Iterator[None]:
        """Inside, variables have whole shapes, to be read from a file."""
        variables = [*self.model.variables, *self.optimizer.variables]
        shapes = [(v, self.shape_of(v)) for v in variables]
        with keras_compat.shaped([(v, s) for v, s in shapes if s is not None]):
            yield

    def _look_at_all(
        self, gradients: Sequence[tf.Tensor], connected: Sequence[int]
    ) -> tuple[Sequence[tf.Tensor], tf.Tensor | None]:
        """Inside ``run``: sums what the ranks must know of each other's parts.

        Keeps the norms to clip by.

        Returns:
            The gradients, not a number where a LossScaleOptimizer of some rank has to
            skip the update, so that all skip it; and whether that is so, None where
            there is no such optimizer.
        """
        core = keras_compat.core_optimizer(self.optimizer)
        scaled = keras_compat.expects_overflow(self.optimizer)
        clips = core.clipnorm or core.global_clipnorm
        if not scaled and not clips:
            return gradients, None
        told = [
            2 * tf.nn.l2_loss(g) if clips and self._counts(i) else tf.zeros([])
            for i, g in zip(connected, gradients, strict=True)
        ]
        if scaled:
            fine = [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
            told.append(tf.cast(tf.logical_not(tf.reduce_all(fine)), tf.float64))
        total = self._total(tf.stack([tf.cast(t, tf.float64) for t in told]))
        scale = tf.cast(keras_compat.loss_scale(self.optimizer), tf.float64)
        self._norms = tf.sqrt(total[: len(gradients)]) / scale
        if not scaled:
            return gradients, None
        skipped = total[-1] > 0
        return [
            tf.where(skipped, tf.constant(math.nan, g.dtype), g) for g in gradients
        ], skipped

    def _clipped(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Keras' clipping, by norms of whole gradients."""
        core = keras_compat.core_optimizer(self.optimizer)
        if core.clipnorm:
            norms = tf.unstack(self._norms)
        elif core.global_clipnorm:
            norms = [tf.norm(self._norms)] * len(gradients)
        else:
            return self._clip(gradients)
        limit = core.clipnorm or core.global_clipnorm
        return [
            g * tf.cast(limit / tf.maximum(norm, limit), g.dtype)
            for g, norm in zip(gradients, norms, strict=True)
        ]
