"""The gradient of each look-up in an embedding, from all replicas, in a user's own step.

So that optimizers see each look-up, as in one process (``step.look_ups``),
``tape.gradient`` returns here the look-ups of the global batch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from collective.training.variants.coupled.look_ups import (
    are_distinct,
    follows_batch,
    gather_look_ups,
    slices_of,
)
from collective.training.variants.custom_step.additive import Key
from collective.training.variants.custom_step.replica import ReplicaHooks

#: A gradient of the step: which call of ``tape.gradient``, and which of its results.
Place: TypeAlias = "tuple[Key, int]"


class LookUpHooks(ReplicaHooks):
    """As ``ReplicaHooks``, but tables have the gradients of single look-ups.

    Those that do not follow the batch, or are distinct, are added up, as other gradients.

    Args:
        gathered: The places of gradients that are gathered, as a traced step has found
            them. An eager step has the same: of its batch every number is known.
        given: As of ``ReplicaHooks``.
    """

    def __init__(self, gathered: set[Place], *given: Any):
        super().__init__(*given)
        self._gathered = gathered
        self._indices: dict[int, tf.Tensor] = {}  # of global look-ups, by id

    def _summed(
        self, gradients: list[Any], variables: list[Any], key: Key | None = None
    ) -> list[Any]:
        if self.alone:
            self._global |= {id(gradient): gradient for gradient in gradients}
            return gradients
        if key is None:
            return self._changed(gradients, variables)
        apart = [i for i, g in enumerate(gradients) if self._is_gathered(g, (key, i))]
        dense, local = self._weighed(gradients, variables, key, self.share)
        for i in apart:
            values = gradients[i].values
            local[i] = self.additive.weighed(key, self.share, values, local[i].dtype)
        sums = iter(self._add_up(local, variables, apart))
        summed = [
            g if i in apart else tf.cast(next(sums), g.dtype)
            for i, g in enumerate(dense)
        ]
        wholes = gather_look_ups(
            [tf.IndexedSlices(local[i], *slices_of(gradients[i])) for i in apart],
            *(self.share.replica, self.backend.most_replicas, self.sums),
        )
        for i, whole in zip(apart, wholes, strict=True):
            values = tf.cast(whole.values, gradients[i].values.dtype)
            summed[i] = tf.IndexedSlices(values, *slices_of(whole))
            self._indices[id(whole.indices)] = whole.indices
        self._global |= {id(total): total for total in summed}
        return summed

    def _is_gathered(self, gradient: Any, place: Place) -> bool:
        if not isinstance(gradient, tf.IndexedSlices):
            return False
        traced = not tf.executing_eagerly()
        if traced and follows_batch(gradient) and not are_distinct(gradient):
            self._gathered.add(place)
        return place in self._gathered

    def _changed(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Gradients that are no sums, or are sums no more, as after clipping.

        Global look-ups keep their indices then, so their values are equal on all replicas,
        and have a mean.
        """
        summed = list(gradients)
        known = [
            i
            for i, g in enumerate(gradients)
            if isinstance(g, tf.IndexedSlices) and id(g.indices) in self._indices
        ]
        for i in known:
            (values,) = self.sums([self.whole.of(gradients[i].values)])
            summed[i] = tf.IndexedSlices(values, *slices_of(gradients[i]))
            self._global[id(summed[i])] = summed[i]
        rest = [i for i in range(len(gradients)) if i not in known]
        if rest:
            totals = super()._summed(
                [gradients[i] for i in rest], [variables[i] for i in rest]
            )
            for i, total in zip(rest, totals, strict=True):
                summed[i] = total
        return summed
