"""The gradient of each look-up in an embedding, from all replicas, in a user's own step.

A batch may look up one row of a table several times. Keras gives the optimizer the
gradient of each look-up by itself (``tf.IndexedSlices`` with repeated indices), and Adam,
RMSprop and others then add up their *squares*, which no sum over replicas has. So
``tape.gradient`` returns here what it returns in one process: the look-ups of the global
batch. A replica has as many as its rows ask for, so their numbers are gathered first.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from collective.training.variants.custom_step.additive import Key
from collective.training.variants.custom_step.replica import ReplicaHooks

#: A gradient of the step: which call of ``tape.gradient``, and which of its results.
Place: TypeAlias = "tuple[Key, int]"


class LookUpHooks(ReplicaHooks):
    """As ``ReplicaHooks``, but tables have the gradients of single look-ups.

    Look-ups whose number is the same for every batch (positions in a sequence) are one
    for each place, not for each row: as all other gradients, they are added up.

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
        wholes = iter(self._gather([(local[i], gradients[i]) for i in apart]))
        summed = [
            next(wholes) if i in apart else tf.cast(next(sums), gradient.dtype)
            for i, gradient in enumerate(dense)
        ]
        self._global |= {id(total): total for total in summed}
        return summed

    def _is_gathered(self, gradient: Any, place: Place) -> bool:
        if not isinstance(gradient, tf.IndexedSlices):
            return False
        if not tf.executing_eagerly() and gradient.values.shape[0] is None:
            self._gathered.add(place)
        return place in self._gathered

    def _gather(
        self, look_ups: list[tuple[tf.Tensor, tf.IndexedSlices]]
    ) -> list[tf.IndexedSlices]:
        """Those of all replicas, in the order of the replicas.

        Args:
            look_ups: Of each table the weighed values, and the slices that they are of.
        """
        if not look_ups:
            return []
        replica = self.share.replica
        own = tf.stack([tf.shape(values, tf.int64)[0] for values, _ in look_ups])
        of_replica = tf.one_hot(replica, self.backend.most_replicas, dtype=tf.int64)
        (counts,) = self.sums([of_replica[:, None] * own])
        totals = tf.reduce_sum(counts, axis=0)
        starts = tf.cumsum(counts, exclusive=True)[replica]
        after = totals - starts - own

        def in_place(number: int, tensor: tf.Tensor) -> tf.Tensor:
            ends = [[starts[number], after[number]]]
            return tf.pad(tensor, ends + [[0, 0]] * (tensor.shape.rank - 1))

        values = self.sums([in_place(i, v) for i, (v, _) in enumerate(look_ups)])
        indices = self.sums(
            [
                in_place(i, tf.cast(s.indices, tf.int64))
                for i, (_, s) in enumerate(look_ups)
            ]
        )
        found = []
        for whole, index, (_, slices) in zip(values, indices, look_ups, strict=True):
            index = tf.cast(index, slices.indices.dtype)
            self._indices[id(index)] = index
            whole = tf.cast(whole, slices.values.dtype)
            found.append(tf.IndexedSlices(whole, index, slices.dense_shape))
        return found

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
            slices = gradients[i].indices, gradients[i].dense_shape
            summed[i] = tf.IndexedSlices(values, *slices)
            self._global[id(summed[i])] = summed[i]
        rest = [i for i in range(len(gradients)) if i not in known]
        if rest:
            totals = super()._summed(
                [gradients[i] for i in rest], [variables[i] for i in rest]
            )
            for i, total in zip(rest, totals, strict=True):
                summed[i] = total
        return summed
