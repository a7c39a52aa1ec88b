"""The variables of a model of which each rank of a tensor group has a shard, and their step.

A checkpoint has them whole. A new training, and what callbacks change, copies shards from
the first replica to the ranks with the same shard of other replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.replacements import replacing
from collective.training import keras_compat
from collective.training.keras_compat.whole_variables import Values, Whole
from collective.training.parallel.layers import TensorParallelLayer
from collective.training.sharding.shards import AxisShard
from collective.training.sharding.whole import ShardedVariables

# Those that treat each element alone. Not: Adafactor, Lamb and Muon.
_ELEMENTWISE = {
    getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax"),
        *("Nadam", "Ftrl", "Lion"),
    )
}


def _check_optimizer(model: keras.Model, option: str, partitioned: bool) -> None:
    """Refuses, before the model is built, an optimizer that cannot update shards.

    Args:
        option: The option that asks for shards.
        partitioned: Whether an earlier training has partitioned its variables already.
    """
    optimizer = keras_compat.optimizers.core_optimizer(model.optimizer)
    if type(optimizer) not in _ELEMENTWISE:
        names = sorted(kind.__name__ for kind in _ELEMENTWISE)
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


def check(model: keras.Model, partitioned_before: bool) -> None:
    """Refuses, before the model is built, what a tensor group cannot train.

    Args:
        partitioned_before: Whether an earlier training has partitioned the model.
    """
    _check_optimizer(model, "--tensor-parallel", partitioned_before)


def split_layers(layer: keras.layers.Layer) -> list[TensorParallelLayer]:
    """Return the layers of a model, or of a layer, that are split over a group."""
    return [
        found
        for found in keras_compat.model.layers_of(layer)
        if isinstance(found, TensorParallelLayer) and found.shards
    ]


def parts_of(layer: keras.layers.Layer) -> int | None:
    """Return the number of ranks that its layers are split over, or None."""
    groups = [found.group for found in split_layers(layer)]
    return groups[0].parts if groups and groups[0] is not None else None


def shards_of(layer: keras.layers.Layer) -> dict[int, AxisShard]:
    """Return how its variables are cut, by ``id``; empty where every rank has them whole."""
    shards: dict[int, AxisShard] = {}
    for found in split_layers(layer):
        shards |= found.shards
    return shards


@contextlib.contextmanager
def without_group(layers: Iterable[TensorParallelLayer]) -> Iterator[None]:
    """Inside, layers compute as the Keras layers that they are derived from."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replacing(layer, "group", None))
        yield


class SplitLayers(ShardedVariables):
    """The variables of a model, or of a layer, that is not prepared for a training.

    Args:
        layer: Built, with split layers in it.
        backend: One with a tensor group.
    """

    def __init__(self, layer: keras.layers.Layer, backend: Backend):
        self._layers = split_layers(layer)
        super().__init__(layer.variables, shards_of(layer), backend)

    @contextlib.contextmanager
    def whole(self, fetch: Callable[[], Values]) -> Iterator[Whole]:
        """Inside, the layers have whole variables, and use them without other ranks."""
        with super().whole(fetch) as found, without_group(self._layers):
            yield found


class TensorParallelVariables(ShardedVariables):
    """Shards of large layers, and of the optimizer's variables for them.

    Keras' optimizer updates a shard as if it were a whole variable. That is right where
    it treats each element alone. Norms to clip by and the search for overflow of loss
    scaling are those of whole gradients here.

    It keeps no reference to the model (``collective.training.model.prepared`` finds it by the
    model).

    Args:
        model: Built and compiled, but for its optimizer, which gets built here.
        backend: One with a tensor group.
    """

    def __init__(self, model: keras.Model, backend: Backend):
        assert backend.tensor is not None
        self.group = backend.tensor
        self._layers: WeakSet[Any] = WeakSet(split_layers(model))
        shards = shards_of(model)
        if not shards:
            raise UsageError(
                f"no layer of model {model.name!r} is split over the "
                f"{self.group.parts} ranks of --tensor-parallel",
                hint="take layers of collective.training.parallel, made within "
                "backend.scope() or by a function given to collective.training.fit; "
                "--model transformer has some. With keras.distribution.ModelParallel: a "
                "pattern in its LayoutMap that matches a variable's path",
            )
        slots = keras_compat.optimizers.build_optimizer(
            model.optimizer, model.trainable_variables
        )
        shards |= {id(slot): shards[id(v)] for slot, v in slots if id(v) in shards}
        every = [*model.variables, *model.optimizer.variables]
        super().__init__(every, shards, backend)

    @contextlib.contextmanager
    def updates(self, optimizer: keras.Optimizer) -> Iterator[None]:
        """Inside, an optimizer clips by norms of whole gradients, and finds any overflow."""
        known = keras_compat.optimizers
        with (
            known.clip_shards(optimizer, self._summed_squares),
            known.find_overflow(optimizer, self._is_finite_everywhere),
        ):
            yield

    @contextlib.contextmanager
    def whole(self, fetch: Callable[[], Values]) -> Iterator[Whole]:
        """Inside, the layers have whole variables, and use them without other ranks."""
        with super().whole(fetch) as found, without_group(self._layers):
            yield found

    def broadcast_shards(self) -> None:
        """Give each rank the shards of the first replica; every rank calls it."""
        for variable in self._sharded:
            variable.assign(self.group.follow(np.asarray(variable)))

    def _summed_squares(
        self, squares: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> list[tf.Tensor]:
        """Compute the sums of squares of whole gradients from those of this rank's parts."""
        is_cut = [self.shape_of(v) is not None for v in variables]
        shards = [s for s, cut in zip(squares, is_cut, strict=True) if cut]
        if not shards:
            return list(squares)
        wide = tf.stack([tf.cast(s, tf.float64) for s in shards])
        sums = iter(tf.unstack(self.group.all_reduce(wide), len(shards)))
        return [
            tf.cast(next(sums), s.dtype) if cut else s
            for s, cut in zip(squares, is_cut, strict=True)
        ]

    def _is_finite_everywhere(self, finite: tf.Tensor) -> tf.Tensor:
        """Return whether the gradients of all ranks are, for all skip an update or none."""
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(self.group.all_reduce(bad), 0)
