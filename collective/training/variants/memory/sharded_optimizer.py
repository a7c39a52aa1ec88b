"""Sharded optimizer state (ZeRO stage 1): each rank keeps and updates its own shard.

Every trainable variable is cut, as a flat vector, into one shard for each rank, the last
one padded with zeros. Gradients are reduce-scattered, so that each rank has the sums of
its own shards. Keras' optimizer, built on variables of these shards, updates each
element as it would within the whole. Norms to clip by are those of the whole
(``collective.training.variants.memory.partitioned``). Then the weights are all-gathered.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends import Options
from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.buckets import by_dtype
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.exchange import join
from collective.training.step.found import Found
from collective.training.step.parts import Span, StepSums
from collective.training.step.reduction import AllReduce
from collective.training.traced import traced
from collective.training.variants.memory import partitioned
from collective.training.variants.memory.partitioned import (
    PartitionedVariables,
    overflow,
    unless,
)
from collective.training.variants.memory.shards import FlatShard

# Elements: a tensor of so many travels alone. It then needs no copy, and is not in
# memory twice together with others.
LARGE = 1 << 16


def check(model: keras.Model, backend: Backend, partitioned_before: bool) -> None:
    """Refuses, before the model is built, what cannot be sharded.

    Args:
        partitioned_before: Whether an earlier training has sharded the optimizer.
    """
    for option in ("algorithm", "transport_dtype", "bucket_bytes"):
        if getattr(backend.options, option) != getattr(Options(), option):
            raise UsageError(
                f"--{option.replace('_', '-')} is for the all-reduce of gradients, and "
                "--shard-optimizer has none",
                hint="drop one of the two",
            )
    partitioned.check_optimizer(model, "--shard-optimizer", partitioned_before)


class ShardedOptimizer(PartitionedVariables):
    """A model's optimizer, of which this rank has its shard.

    Args:
        model: Built and compiled, but for its optimizer, which gets built here.
        backend: One with a replica in each process.

    Attributes:
        own: This rank's shards, which the optimizer was built for.
    """

    backend: ShardCollectives

    def __init__(self, model: keras.Model, backend: Backend):
        assert isinstance(backend, ShardCollectives)
        all_gather = backend.all_gather
        self._gather = traced(lambda shard: backend.run(all_gather, (shard,)))
        variables = list(model.trainable_variables)
        self._cuts = [FlatShard(v.shape, backend, self._all_gather) for v in variables]
        with backend.scope():
            self.own, slots = keras_compat.build_for_shards(
                model.optimizer, variables, [shard.length for shard in self._cuts]
            )
        super().__init__(model, backend, {id(slot): self._cuts[i] for slot, i in slots})
        self._whole: Sequence[tf.Tensor] | None = None

    def reduce_scatter(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Inside ``run``: this rank's shards of the sums, flat."""
        sums: list[Any] = [None] * len(gradients)
        for group in by_dtype(gradients, alone=LARGE):
            rows = [self._flat(gradients[i].shape).rows(gradients[i]) for i in group]
            own = self.backend.reduce_scatter(join(rows, axis=1))
            shards = tf.split(own, [row.shape[1] for row in rows])
            for i, shard in zip(group, shards, strict=True):
                sums[i] = shard
        return sums

    def apply(self, gradients: Sequence[tf.Tensor], connected: Sequence[int]) -> None:
        """Inside ``run``: updates this rank's shards, then all weights."""
        gradients, skipped = self._exchange_norms(gradients, connected)
        self._update(gradients, connected, skipped)

    def apply_whole(
        self, gradients: Sequence[tf.Tensor], connected: Sequence[int]
    ) -> None:
        """As ``apply``, of gradients that every rank has whole.

        Keras clips them before they are cut, so the bits are those of an optimizer that
        is not sharded.
        """
        skipped = None
        if keras_compat.expects_overflow(self.optimizer):
            skipped = overflow(gradients)
            gradients = unless(skipped, gradients)
        scale = keras_compat.loss_scale(self.optimizer)
        self._whole = [g / tf.cast(scale, g.dtype) for g in gradients]
        self._update(self._cut(gradients), connected, skipped)

    def _update(
        self,
        gradients: Sequence[tf.Tensor],
        connected: Sequence[int],
        skipped: tf.Tensor | None,
    ) -> None:
        """Keras' optimizer on this rank's shards, then the weights of all ranks."""
        rank = self.backend.replica()
        self.backend.assign(
            [keras_compat.tf_variable(own) for own in self.own],
            [
                shard.cut_for(tf.convert_to_tensor(v), rank)
                for shard, v in zip(self._cuts, self._trainable, strict=True)
            ],
        )
        own = [self.own[i] for i in connected]
        keras_compat.apply(self.optimizer, gradients, own, self.backend.assign)
        self._gather_weights(connected, skipped)

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        core = keras_compat.core_optimizer(self.optimizer)
        if not core.use_ema:
            return
        with self.backend.scope():
            core.finalize_variable_values(self.own)
        run = traced(lambda: self.backend.run(self._gather_weights, ()))
        run()

    def _clip(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Keras' clipping, of whole gradients where there are any."""
        if self._whole is None:
            return super()._clip(gradients)
        return self._cut(self._keras_clip(self._whole))

    def _cut(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """This rank's shards of whole gradients."""
        rank = self.backend.replica()
        return [self._flat(g.shape).cut_for(g, rank) for g in gradients]

    def _all_gather(self, shard: tf.Tensor) -> tf.Tensor:
        """``Backend.all_gather``, outside ``run``."""
        # Calls of the function itself would have TensorFlow warn of retracing.
        spec = tf.TensorSpec(shard.shape, shard.dtype)
        return self._gather.get_concrete_function(spec)(shard)

    def _flat(self, shape: Sequence[int]) -> FlatShard:
        return FlatShard(shape, self.backend, self._all_gather)

    def _gather_weights(
        self, constrained: Sequence[int] = (), unless: tf.Tensor | None = None
    ) -> None:
        """Inside ``run``: makes the weights out of the shards of all ranks.

        One group after the other, so that few weights are in memory twice at a time.

        Args:
            constrained: Indices of the weights that may have a constraint to apply.
            unless: Scalar; where it is true, constraints are left out.
        """
        done: list[tf.Tensor] = []
        for group in by_dtype(self._trainable, alone=LARGE):
            with tf.control_dependencies(done):
                own = [tf.convert_to_tensor(self.own[i]) for i in group]
            rows = self.backend.all_gather(join(own, axis=0))
            pieces = tf.split(rows, [self._cuts[i].length for i in group], axis=1)
            done = []
            for i, piece in zip(group, pieces, strict=True):
                value = self._cuts[i].join(piece)
                constraint = self._trainable[i].constraint
                if constraint is not None and i in constrained:
                    changed = constraint(value)
                    value = (
                        changed if unless is None else tf.where(unless, value, changed)
                    )
                done.append(value)
            self.backend.assign(
                [keras_compat.tf_variable(self._trainable[i]) for i in group], done
            )

    def _sum_over_shards(self, numbers: tf.Tensor) -> tf.Tensor:
        return self.backend.all_reduce([numbers])[0]


class WholeGradients:
    """The update of a sharded optimizer from gradients that every rank has whole."""

    def __init__(self, shards: ShardedOptimizer):
        self.check = shards.check
        self.apply = shards.apply_whole
        self.finish = shards.finish


class ReduceScatter(AllReduce):
    """An all-reduce without the gradients, which are reduce-scattered."""

    def __init__(self, backend: Backend, dtype: tf.DType, shards: ShardedOptimizer):
        super().__init__(backend, dtype)
        self.shards = shards

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``; the span is that of the all-reduce."""
        gradients = local.sums.gradients
        rest = local._replace(sums=local.sums._replace(gradients=[]))
        total, span = super().__call__(rest, found)
        flat = [tf.cast(g, self.dtype) for g in tf.nest.flatten(gradients)]
        own = tf.nest.pack_sequence_as(gradients, self.shards.reduce_scatter(flat))
        return total._replace(sums=total.sums._replace(gradients=own)), span
