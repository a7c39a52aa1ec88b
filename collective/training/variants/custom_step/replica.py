"""One replica inside a user's own step: what is summed over replicas, and where.

Replica r has n_r of the N rows of the global batch; s_r = n_r / N is its share. The
user's code computes means over its n_r rows. The mean over all N rows is

    sum_r s_r mean_r,

so gradients are multiplied by s_r and summed. This is a weighted mean of the replicas'
gradients: applied to gradients that are equal on all replicas, it changes nothing. A
gradient may therefore pass here twice, and never counts twice.

They are summed where ``tape.gradient`` returns them, so that code that clips or logs
gradients has those of the global batch, as in one process. What reaches an optimizer
and is not such a sum (made without a tape, or changed since) is summed there.

Where the check finds that a number is a sum over rows (the gradient of a vector of losses,
a counter of rows), s_r is left out: ``additive.py``.

Losses keep their meaning as means over the replica's rows. Where the denominator is not
the number of rows, the value is scaled so that the formula above holds:

    masks, weighted means:  total_r / W   * 1 / s_r,   W = sum_r W_r, one all-reduce
    sums over rows:         total_r       * 1 / s_r
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.keras_compat import Hooks
from collective.training.step import finite, look_ups
from collective.training.step.reduction import is_small, sum_tensors
from collective.training.step.rows import Rows
from collective.training.traced import traced
from collective.training.variants.coupled.replica import ReplicaContext
from collective.training.variants.custom_step.additive import Additive, Key
from collective.training.variants.custom_step.share import Share

#: In place of ``optimizer.apply``: an optimizer, gradients and variables.
ApplyBy = Callable[[keras.Optimizer, "list[Any]", "list[Any]"], Any]


class OrderedSums:
    """All-reduces that run in the order of the program, on every rank.

    TensorFlow orders operations that use the same variable, also within the branches of
    a condition; two all-reduces otherwise have no order.
    """

    def __init__(self, backend: Backend):
        self.backend = backend
        with tf.device("CPU"):
            self.order = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._in_graph = traced(self._sum_exactly)

    def __call__(
        self, tensors: Sequence[tf.Tensor], gradients: int = 0
    ) -> list[tf.Tensor]:
        """Sums tensors of one dtype; the first ``gradients`` of them are gradients."""
        if tf.executing_eagerly() and len(self.backend.local_replicas) > 1:
            return self._sum_exactly(list(tensors))
        if tf.executing_eagerly():  # backends sum within a graph
            values = [tf.constant(t.numpy()) for t in tensors]  # no tape's
            specs = [tf.TensorSpec(_open(value), value.dtype) for value in values]
            traced = self._in_graph.get_concrete_function(specs)
            return list(traced(values))

        def summed() -> list[tf.Tensor]:
            own = [tf.identity(t) for t in tensors]
            return sum_tensors(self.backend, own, list(range(gradients)))

        totals = self.in_turn(tensors, summed)
        for total, tensor in zip(totals, tensors, strict=True):
            total.set_shape(tensor.shape)
        return totals

    def in_turn(
        self, inputs: Sequence[tf.Tensor], run: Callable[[], list[tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Runs what has collectives in it, after those before and before those behind.

        Args:
            run: Returns tensors of the operations to wait for.
        """
        with tf.control_dependencies(list(inputs)):
            begin = self.order.assign_add(1, read_value=False)
        with tf.control_dependencies([begin]):
            results = run()
        with tf.control_dependencies(results):
            self.order.assign_add(1, read_value=False)
        return results

    def _sum_exactly(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return sum_tensors(self.backend, tensors, [])


def _open(value: tf.Tensor) -> list[int | None]:
    """The shape, open where rows of tables or batches are: one trace for all."""
    return list(value.shape) if is_small(value) else [None, *value.shape[1:]]


@dataclass(eq=False)
class OrderedReplica(ReplicaContext):
    """A replica in its pass, whose sums are in order with those of gradients.

    Its loss is a mean over its rows; that of the global batch is a weighted mean of these.
    """

    sums: OrderedSums | None = None
    share: Share | None = None

    def of_whole(self, gradient: tf.Tensor) -> tf.Tensor:
        """Times the share of its rows."""
        assert self.share is not None
        return self.share.of(gradient)

    def of_part(self, gradient: tf.Tensor) -> tf.Tensor:
        """Divided by the share."""
        assert self.share is not None
        return self.share.undone(gradient)

    def _in_order(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        assert self.sums is not None
        return self.sums(tensors)


class ReplicaHooks(Hooks):
    """What one replica does at the intercepted calls of one step.

    Args:
        apply_by: What applies gradients; None: the optimizers themselves.
    """

    def __init__(
        self, sums: OrderedSums, share: Share, apply_by: ApplyBy | None = None
    ):
        self.sums = sums
        self.apply_by = apply_by
        self.backend = sums.backend
        self.alone = self.backend.most_replicas == 1
        self.share = self.whole = share
        self.additive = Additive()
        # ids of the TensorFlow variables that optimizers write: equal on all replicas
        # without another sum.
        self.updated: set[int] = set()
        # Names of the variables of all gradients, in the order in which
        # ``finite.first_of`` numbers them.
        self.paths: list[str] = []
        self._global: dict[int, Any] = {}  # tensors that are sums already, by id
        self._located: list[tf.Tensor] = []
        self._combined: list[Any] = []  # variables whose look-ups were added up

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Sums them over the replicas."""
        return self._summed(gradients, variables, self.additive.next("gradient"))

    def _summed(
        self, gradients: list[Any], variables: list[Any], key: Key | None = None
    ) -> list[Any]:
        """The sums; with a key, as it says that they are to be made."""
        self._note_look_ups(gradients, variables)
        if self.alone:
            dense = self._dense(gradients, variables)
            self._global |= {id(g): g for g in dense}
            return dense
        share = self.whole if key is None else self.share
        dense, local = self._weighed(gradients, variables, key, share)
        if key is not None:
            local = self._replica_sums(local)
        totals = self._add_up(local, variables)
        summed = [tf.cast(t, g.dtype) for t, g in zip(totals, dense, strict=True)]
        self._global |= {id(total): total for total in summed}
        return summed

    def _note_look_ups(self, gradients: list[Any], variables: list[Any]) -> None:
        pairs = zip(gradients, variables, strict=True)
        self._combined += [v for g, v in pairs if isinstance(g, tf.IndexedSlices)]

    def _add_up(
        self, local: list[tf.Tensor], variables: list[Any], apart: Sequence[int] = ()
    ) -> list[tf.Tensor]:
        """The sums over replicas of all but those at the places ``apart``."""
        place = self._locate(local, variables)
        together = [t for i, t in enumerate(local) if i not in apart]
        *totals, located = self.sums(
            [*together, tf.cast(place, local[0].dtype)], len(together)
        )
        self._located.append(located)
        return totals

    def _dense(self, gradients: list[Any], variables: list[Any]) -> list[tf.Tensor]:
        return [_dense(*pair) for pair in zip(gradients, variables, strict=True)]

    def _weighed(
        self, gradients: list[Any], variables: list[Any], key: Key | None, share: Share
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The gradients, dense; and what they add to the sums over replicas."""
        dense = self._dense(gradients, variables)
        wide = any(g.dtype == tf.float64 for g in dense)
        dtype = tf.float64 if wide else tf.float32
        self.additive.record(key, share, dense)
        return dense, [self.additive.weighed(key, share, g, dtype) for g in dense]

    def _replica_sums(self, local: list[tf.Tensor]) -> list[tf.Tensor]:
        """What all rows of the replica add, from what those of this call do."""
        return local

    def _locate(self, local: list[tf.Tensor], variables: list[Any]) -> tf.Tensor:
        """``finite.at_replica``; variables are counted over all gradients of the step."""
        first = len(self.paths)
        self.paths += map(keras_compat.path_of, variables)
        place = finite.at_replica(finite.first(local), self.backend)
        return tf.where(place > 0, place + first, place)

    def on_apply(
        self, optimizer: keras.Optimizer, gradients: list[Any], variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Sums what is not a sum yet; looks for what is not finite."""
        given = [i for i, g in enumerate(gradients) if g is not None]
        values, targets = [gradients[i] for i in given], [variables[i] for i in given]
        if not all(id(value) in self._global for value in values):
            values = self._summed(values, targets)
            for i, total in zip(given, values, strict=True):
                gradients[i] = total
        if self.backend.rank == 0:
            look_ups.note(self._combined, optimizer)
        skips = keras_compat.expects_overflow(optimizer)
        before = [] if skips else self._check(values, targets)
        if not optimizer.built:
            optimizer.build(variables)
        written = [*variables, *optimizer.variables]
        self.updated |= {id(keras_compat.tf_variable(v)) for v in written}
        return gradients, before

    def update(
        self,
        optimizer: keras.Optimizer,
        gradients: list[Any],
        variables: list[Any],
        apply: Callable[..., Any],
    ) -> Any:
        """Writes variables."""
        return (self.apply_by or apply)(optimizer, gradients, variables)

    def _check(self, gradients: list[tf.Tensor], variables: list[Any]) -> list[Any]:
        """Fails on every replica where one has a gradient that is not finite."""
        if not gradients:
            return []
        gradients = [look_ups.values_of(gradient) for gradient in gradients]
        if self.alone:
            located = self._locate(gradients, variables)
            return finite.check(located, self.share.number, self.backend)
        sums = [tf.cast(tf.reduce_sum(g), tf.float32) for g in gradients]
        fine = tf.math.is_finite(tf.add_n(sums))
        located = tf.one_hot(0, self.backend.most_replicas)  # where it is not known
        for seen in filter(_in_scope, self._located):
            found = tf.reduce_any(seen > 0)
            located = tf.where(found, tf.cast(seen, tf.float32), located)
        located = tf.where(fine, tf.zeros_like(located), located)
        return finite.check(located, self.share.number, self.backend)

    def drawing(self, rows: Rows) -> contextlib.AbstractContextManager[list[str]]:
        """Around the step: its rows of the random numbers of the whole batch."""
        if self.alone:
            return contextlib.nullcontext([])
        share = self.share
        count = count_rows(first_leaf(rows.x))  # one where the replica has none
        place = keras_compat.Place(share.first_row, count, share.global_rows)
        return keras_compat.draw_rows(place)

    def on_scalar(self, value: Any, weight: Any) -> tuple[Any, Any]:
        """Counts the number by the share of the rows that it was computed from."""
        if self.alone or self._is_own_rows(weight):
            return value, weight
        key = self.additive.next("scalar")
        self.additive.record(key, self.share, [value])
        if key in self.additive.found:
            value = self.share.undone(value)
        share = self.share.of(tf.ones([], keras.config.floatx()))
        return value, share if weight is None else share * weight

    def _is_own_rows(self, weight: Any) -> bool:
        """Whether a weight is the number of rows: in a graph that is a tensor."""
        return (
            isinstance(weight, int | np.integer)
            and tf.executing_eagerly()
            and int(weight) == int(self.share.rows)
        )

    def on_loss(
        self, loss: Any, values: Any, weight: Any, mask: Any, reduction: str
    ) -> Any:
        """Scales a loss that is not a mean over the rows."""
        if self.alone:
            return loss
        if reduction == "sum":
            return self.share.undone(loss)
        averages = reduction == "mean_with_sample_weight" and weight is not None
        means = reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
        if not (averages or (mask is not None and means)):
            return loss
        own = _denominator(loss.dtype, values, weight, mask, averages)
        own = self.share.if_any(own)
        total = self._total_weight(tf.stop_gradient(own))
        return self.share.undone(loss * tf.math.divide_no_nan(own, total))

    def _total_weight(self, own: tf.Tensor) -> tf.Tensor:
        """By what the loss of the whole batch is divided, from that of these rows."""
        (total,) = self.sums([own])
        return total


def _denominator(
    dtype: tf.DType, values: Any, weight: Any, mask: Any, averages: bool
) -> tf.Tensor:
    """By what Keras divides the sum of the values: a scalar of this dtype."""
    if not averages:
        return tf.reduce_sum(tf.cast(mask, dtype))
    weight = tf.cast(weight, dtype)
    if mask is not None:
        mask, weight = keras_compat.same_rank(tf.cast(mask, dtype), weight)
        weight = weight * mask
    return tf.reduce_sum(keras_compat.same_rank(tf.cast(values, dtype), weight)[1])


def _dense(gradient: Any, variable: Any) -> tf.Tensor:
    """As a tensor: repeated rows of IndexedSlices are summed."""
    dense = tf.convert_to_tensor(gradient)
    if not tf.executing_eagerly():
        dense.set_shape(variable.shape)
    return dense


def _in_scope(tensor: Any) -> bool:
    """Whether a tensor of an earlier place can be used here: not one of a branch."""
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not tensor.graph:
        graph = getattr(graph, "outer_graph", None)
    return graph is not None
