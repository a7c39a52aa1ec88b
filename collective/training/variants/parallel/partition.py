"""The variables of a model of which each rank of a tensor group has a shard, and their step.

A checkpoint has them whole. A new training, and what callbacks change, copies shards from
the first replica to the ranks with the same shard of other replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import Values, Whole
from collective.training.sharding.shards import Shard
from collective.training.sharding.whole import ShardedVariables
from collective.training.step.attachments import Attachment
from collective.training.step.found import Found
from collective.training.step.parts import Span, StepSums
from collective.training.step.reduction import AllReduce
from collective.training.variants.memory import partitioned
from collective.training.variants.memory.partitioned import PartitionedVariables
from collective.training.variants.parallel.layers import TensorParallelLayer


def check(model: keras.Model, partitioned_before: bool) -> None:
    """Refuses, before the model is built, what a tensor group cannot train.

    Args:
        partitioned_before: Whether an earlier training has partitioned the model.
    """
    partitioned.check_optimizer(model, "--tensor-parallel", partitioned_before)


def split_layers(layer: keras.layers.Layer) -> list[TensorParallelLayer]:
    """The layers of a model, or of a layer, that are split over a group."""
    return [
        found
        for found in layer._flatten_layers()
        if isinstance(found, TensorParallelLayer) and found.shards
    ]


def parts_of(layer: keras.layers.Layer) -> int | None:
    """Over how many ranks layers of it are split; None: every rank has them whole."""
    groups = [found.group for found in split_layers(layer)]
    return groups[0].parts if groups and groups[0] is not None else None


def shards_of(layer: keras.layers.Layer) -> dict[int, Shard]:
    """How its variables are cut, by ``id``; empty where every rank has them whole."""
    shards: dict[int, Shard] = {}
    for found in split_layers(layer):
        shards |= found.shards
    return shards


@contextlib.contextmanager
def without_group(layers: Iterable[TensorParallelLayer]) -> Iterator[None]:
    """Inside, layers compute as the Keras layers that they are derived from."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(mock.patch.object(layer, "group", None))
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


class TensorParallelVariables(PartitionedVariables):
    """Shards of large layers, and of the optimizer's variables for them.

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
                hint="take layers of collective.training.variants.parallel, made within "
                "backend.scope() or by a function given to collective.training.fit; "
                "--model transformer has some. With keras.distribution.ModelParallel: a "
                "pattern in its LayoutMap that matches a variable's path",
            )
        slots = keras_compat.build_optimizer(model.optimizer, model.trainable_variables)
        shards |= {id(slot): shards[id(v)] for slot, v in slots if id(v) in shards}
        super().__init__(model, backend, shards)

    @contextlib.contextmanager
    def whole(self, fetch: Callable[[], Values]) -> Iterator[Whole]:
        """Inside, the layers have whole variables, and use them without other ranks."""
        with super().whole(fetch) as found, without_group(self._layers):
            yield found

    def broadcast_shards(self) -> None:
        """Gives each rank the shards of the first replica; every rank calls it."""
        for variable in self._sharded:
            variable.assign(self.group.follow(np.asarray(variable)))

    def check(self, found: Found) -> None:
        """Refuses layers that set variables, or assign them, in a forward pass."""
        self._refuse([*found.overwritten, *found.assigned])

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


class ByRank(AllReduce):
    """An all-reduce, then what each rank of a replica has contributed.

    The all-reduce sums over replicas; ranks of one replica have different totals.

    Args:
        dtype: As for ``AllReduce``.
        group: The ranks of this replica (``Backend.tensor``).
        attachments: Of ``StepSums.attached``.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: tf.DType,
        group: Any,
        attachments: Sequence[Attachment],
    ):
        super().__init__(backend, dtype)
        self.group = group
        self.attachments = attachments

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``; the span is that of the all-reduce."""
        total, span = super().__call__(local, found)
        chosen = [place for place, a in enumerate(self.attachments) if a.per_rank]
        tensors = [t for place in chosen for t in total.attached[place]]
        columns = [total.not_finite[:, None], *tensors]
        by_rank = self.group.by_rank(tf.concat(columns, axis=1))
        pieces = tf.split(by_rank, [c.shape[1] for c in columns], axis=1)
        attached = list(total.attached)
        left = iter(pieces[1:])
        for place in chosen:
            attached[place] = [next(left) for _ in attached[place]]
        return total._replace(not_finite=pieces[0][:, 0], attached=attached), span
