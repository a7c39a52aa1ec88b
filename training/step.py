"""One optimizer update, the same under every backend.

The order, and there is no other right one:

    local sums -> all-reduce -> / global weight -> un-scale -> finite?
               -> clip -> weight decay -> update -> constraints -> average

Clipping after the sum is what makes N replicas train the model that one would. The
last five are Keras' own optimizer, untouched, given gradients that are already sums.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError
from collective.training import keras_compat
from collective.training.accumulation import accumulate, cut
from collective.training.elastic.control_messages import ControlMessages
from collective.training.forward import Forward, Sums
from collective.training.gradient_sizes import SMALL
from collective.training.input.pipeline import Batch
from collective.training.input.plan import share
from collective.training.ledger import receipts
from collective.training.memory import partitioned, sharded_optimizer
from collective.training.parallel import placement
from collective.training.replica_check import DesyncAlarm
from collective.training.reporting.report import Layout

NOT_FINITE = "collective: not finite at step"


class Step:
    """The training step of a model on a backend.

    Args:
        model: Compiled and built (``keras_compat.build``) in the backend's scope.
        backend: What sums the gradients.
        spec: ``Batch`` of ``tf.TensorSpec`` with an open first dimension.
        accumulate: Micro-batches per update and replica.
        jit_compile: Whether XLA compiles the forward and backward pass.
        recompute: Whether activations are computed again instead of kept.
        seed: What random layers draw from, with step, replica and micro-batch.
        maybe_empty: Whether a replica may have to do with no row at all.
        check_every: Steps from one comparison of the replicas' parameters and
            optimizer state to the next; 0 for never.

    Raises:
        CollectiveError: In the call, on every rank, when loss or gradients are not
            finite (nothing has been applied then), or when the replicas differed
            before the step.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        spec: Batch,
        *,
        accumulate: int = 1,
        jit_compile: bool = False,
        recompute: bool = False,
        seed: int = 0,
        maybe_empty: bool = True,
        check_every: int = 0,
    ):
        self.model = model
        self.optimizer = model.optimizer
        self.backend = backend
        self.parts = accumulate
        self.maybe_empty = maybe_empty
        self.forward = Forward(model, seed, recompute)
        self.layout = Layout(model)
        self.parted, self.shards = partitioned.of(model), sharded_optimizer.of(model)
        self.alarm = DesyncAlarm(model, backend, check_every)
        self.notices = ControlMessages(backend)
        keras_compat.switch_off_gradient_sum(self.optimizer)
        if not backend.synchronous:
            keras_compat.count_atomically(self.optimizer)
        dtypes = {v.dtype for v in model.trainable_variables}
        self.dtype = tf.float64 if "float64" in dtypes else tf.float32
        variables = (
            [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables],
            [tf.TensorSpec(v.shape, v.dtype) for v in model.non_trainable_variables],
        )
        scalar = tf.TensorSpec([], tf.int64)
        data = (*without_none(spec)[:3], scalar, tf.TensorSpec([], tf.float32))
        following = functools.partial(placement.following, model)
        self._micro = tf.function(
            following(self.forward.train),
            input_signature=(*variables, *data, tf.TensorSpec([3], tf.int64)),
            jit_compile=jit_compile,
            autograph=False,
        )
        # Traced here, outside any strategy: they touch no variable, and what they
        # return must be known before the loop over micro-batches.
        self._shapes = self._micro.get_concrete_function().structured_outputs[0]
        self._local = tf.function(
            following(self._local_sums),
            input_signature=(*variables, *data, scalar, scalar, scalar),
            autograph=False,
        )
        self._local.get_concrete_function()
        self._run = tf.function(
            lambda batch, number: backend.run(
                following(self._replica), (batch, number)
            ),
            input_signature=(without_none(spec), tf.TensorSpec([], tf.int64)),
            autograph=False,
        )

    def __call__(self, batch: Batch, number: int) -> tf.Tensor:
        """Trains on one global batch.

        Args:
            batch: This process' slice of it.
            number: Which step of the training this is, from 0.

        Returns:
            The report (see ``collective.training.reporting.report``), the same on every rank; see
            ``Backend.call``.
        """
        args = (without_none(batch), tf.constant(number, tf.int64))
        self.notices.prepare()
        told = self.backend.call(self._run, args, self._explained)
        report, *more = told if self.alarm.every or self.notices.enabled else [told]
        if self.notices.enabled:
            self.notices.receive(more.pop())
        if self.alarm.due(number):
            self.alarm.compare(more[0].numpy(), number)
        return report

    def _beside(self, sums: Sums) -> Sums:
        """Where the model is on several devices: gradients beside their variables."""
        placed = self.forward.placement
        if placed is None:
            return sums
        variables = [self.model.trainable_variables[i] for i in self.forward.connected]
        gradients = [placed.beside(of, variables) for of in sums.gradients]
        return sums._replace(gradients=gradients)

    def _replica(self, batch: Batch, number: tf.Tensor) -> Any:
        """One replica's update: the report; and all checksums, and notices, if any."""
        trainable = [tf.convert_to_tensor(v) for v in self.model.trainable_variables]
        state = [tf.convert_to_tensor(v) for v in self.model.non_trainable_variables]
        replica = tf.cast(self.backend.replica(), tf.int64)
        data, rows, read = replica_rows(self.backend, batch, replica)
        sums, new_state = self._local(
            trainable,
            state,
            *data,
            batch.global_rows,
            keras_compat.loss_scale(self.optimizer),
            rows,
            number,
            replica,
        )
        sums = self._beside(sums)
        changing = self.forward.changing
        share_of_rows = tf.cast(rows, self.dtype) / tf.cast(
            batch.global_rows, self.dtype
        )
        moved = [
            (tf.cast(new, self.dtype) - tf.cast(state[i], self.dtype)) * share_of_rows
            for i, new in zip(changing, new_state, strict=True)
        ]
        trouble = self._trouble(sums)
        receipt = self._receipt(read, replica)
        parts: Any = tf.nest.map_structure(
            lambda t: tf.cast(t, self.dtype),
            (
                *(sums, moved, trouble, self.alarm.contribution(number), receipt),
                self.notices.contribution(),
            ),
        )
        if self.shards is not None:  # their gradients go another way
            whole = parts[0].gradients
            parts = (parts[0]._replace(gradients=[]), *parts[1:])
        local = tf.nest.flatten(parts)
        gradients = {id(t) for t in tf.nest.flatten(parts[0].gradients)}
        rounded = [place for place, t in enumerate(local) if id(t) in gradients]
        with tf.control_dependencies(local):
            start = tf.timestamp()
        if not self.backend.overlaps:
            with tf.control_dependencies([start]):
                local = [tf.identity(t) for t in local]
        reduced = self._all_reduce(local, rounded)
        with tf.control_dependencies([start, *reduced]):
            stop = tf.timestamp()
        sums, moved, trouble, checksums, receipt, notices = tf.nest.pack_sequence_as(
            parts, reduced
        )
        if self.shards is not None:
            flat = self.shards.reduce_scatter(tf.nest.flatten(whole))
            sums = sums._replace(gradients=tf.nest.pack_sequence_as(whole, flat))
        if self.backend.tensor is not None:  # all ranks of a replica must know, too
            told = tf.concat([tf.cast(trouble, checksums.dtype)[:, None], checksums], 1)
            told = self.backend.tensor.by_rank(told)
            trouble, checksums = told[:, 0], told[:, 1:]
        # All writing waits for the check: weight decay, the optimizer's counter and
        # the state do not depend on the gradients, and must not move without them.
        # And for every sum: where a rank dies, a step is made as a whole or not.
        with tf.control_dependencies([stop, *self._check(trouble, number)]):
            self._update(sums)
            old = [state[i] for i in changing]
            self.backend.assign(
                [
                    keras_compat.tf_variable(self.model.non_trainable_variables[i])
                    for i in changing
                ],
                [_moved(o, m) for o, m in zip(old, moved, strict=True)],
            )
        loss, outputs = global_loss(sums)
        report = self.layout.pack(
            loss, batch.global_rows, (start, stop), outputs, sums.metrics, receipt
        )
        more = [checksums] * bool(self.alarm.every) + notices
        return (report, *more) if more else report

    def _local_sums(
        self,
        trainable: list[tf.Tensor],
        state: list[tf.Tensor],
        x: Any,
        y: Any,
        sample_weight: Any,
        global_rows: tf.Tensor,
        scale: tf.Tensor,
        rows: tf.Tensor,
        number: tf.Tensor,
        replica: tf.Tensor,
    ) -> tuple[Sums, list[tf.Tensor]]:
        """Sums over a replica's rows, and the changing state after them. Pure."""
        changing = self.forward.changing

        def compute(
            part: tf.Tensor, data: Any, changed: list[tf.Tensor]
        ) -> tuple[Sums, list[tf.Tensor]]:
            current = list(state)
            for i, value in zip(changing, changed, strict=True):
                current[i] = value
            draw = tf.stack([number, replica, tf.cast(part, tf.int64)])
            sums, new = self._micro(trainable, current, *data, global_rows, scale, draw)
            return self._beside(sums), new

        return accumulate(
            compute,
            lambda: tf.nest.map_structure(
                lambda t: tf.zeros(t.shape, t.dtype), self._shapes
            ),
            [state[i] for i in changing],
            rows,
            (x, y, sample_weight),
            self.parts,
            self.maybe_empty,
        )

    def _trouble(self, sums: Sums) -> tf.Tensor:
        """For each replica 1 + the first variable whose gradient is not finite.

        0 where all is well, and one more than there are variables where only the loss
        is not finite. A vector of ``most_replicas``; each fills in its own place.
        (Where several ranks hold a replica, the step makes it one of ranks.)
        """
        bad = [
            tf.logical_not(tf.math.is_finite(tf.add_n([tf.reduce_sum(g) for g in of])))
            for of in zip(*sums.gradients, strict=True)
        ]
        bad.append(tf.logical_not(tf.math.is_finite(tf.add_n(sums.losses))))
        flags = tf.stack(bad)
        first = tf.where(tf.reduce_any(flags), tf.argmax(flags) + 1, 0)
        return tf.one_hot(self.backend.replica(), self.backend.most_replicas) * tf.cast(
            first, tf.float32
        )

    def _receipt(self, read: Any, replica: tf.Tensor) -> list[tf.Tensor]:
        """What this replica says it has read, if the batches tell their rows."""
        if isinstance(read, tuple):
            return []
        return [receipts.write(read, replica, self.backend.most_replicas)]

    def _all_reduce(
        self, tensors: list[tf.Tensor], rounded: list[int]
    ) -> list[tf.Tensor]:
        """One call; scalars and vectors of a few numbers ride in one tensor.

        Args:
            tensors: The local sums.
            rounded: Places of the gradients, which may travel in 16 bits.
        """
        small = [i for i, t in enumerate(tensors) if t.shape.num_elements() <= SMALL]
        large = [i for i in range(len(tensors)) if i not in set(small)]
        flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in small], axis=0)
        head, *rest = self.backend.all_reduce(
            [flat, *(tensors[i] for i in large)],
            [1 + large.index(i) for i in rounded if i in large],
        )
        sizes = [tensors[i].shape.num_elements() for i in small]
        out = dict(zip(large, rest, strict=True))
        for i, piece in zip(small, tf.split(head, sizes), strict=True):
            out[i] = tf.reshape(piece, tensors[i].shape)
        return [out[i] for i in range(len(tensors))]

    def _check(self, trouble: tf.Tensor, number: tf.Tensor) -> list[tf.Operation]:
        """Fails on every replica when any had trouble; what to wait for."""
        if keras_compat.expects_overflow(self.optimizer):
            return []
        fine = tf.debugging.Assert(
            tf.reduce_all(trouble == 0),
            [NOT_FINITE, number, tf.cast(trouble, tf.int32)],
            summarize=max(self.backend.most_replicas, self.backend.size),
        )
        return [] if fine is None else [fine]

    def _update(self, sums: Sums) -> None:
        """Divides the summed gradients and hands them to Keras' optimizer."""
        connected = self.forward.connected
        variables = [self.model.trainable_variables[i] for i in connected]
        divisors = [tf.ones([], self.dtype)] if self.forward.has_planned else []
        divisors += sums.weights
        gradients = []
        for of, variable in zip(
            zip(*sums.gradients, strict=True), variables, strict=True
        ):
            terms = [
                g
                if i == 0 and self.forward.has_planned
                else tf.math.divide_no_nan(g, d)
                for i, (g, d) in enumerate(zip(of, divisors, strict=True))
            ]
            gradients.append(tf.cast(tf.add_n(terms), variable.dtype))
        if self.parted is not None:
            self.parted.apply(gradients, connected)
        else:
            keras_compat.apply(
                self.optimizer, gradients, variables, self.backend.assign
            )

    def _explained(self, error: Exception) -> Exception:
        """What to raise for an error of some step: not always of the last one."""
        message = str(error)
        if NOT_FINITE not in message:
            return error
        numbers = r"\]?\s*\[(\d+)\]\s*\[([\d ]+)\]"
        found = re.search(re.escape(NOT_FINITE) + numbers, message)
        number = found.group(1) if found else "unknown"
        codes = [int(c) for c in found.group(2).split()] if found else [1]
        replica = next((r for r, code in enumerate(codes) if code), 0)
        where = "rank" if self.backend.size > 1 else "replica"
        index = codes[replica] - 1
        connected = self.forward.connected
        if index < len(connected):
            variable = self.model.trainable_variables[connected[index]]
            what = f"the first gradient that is not finite is that of {variable.path!r}"
        else:
            what = "its gradients are finite"
        return CollectiveError(
            f"step {number}: the loss or its gradient is not finite on {where} "
            f"{replica}; {what}. No rank applied the step.",
            hint="lower --learning-rate, clip with --global-clipnorm 1, or look for "
            "NaN in that rank's data",
        )


def without_none(batch: Batch) -> Batch:
    """The batch with ``()`` for what is not there: a signature cannot hold None."""
    return Batch(*(() if part is None else part for part in batch))


def replica_rows(
    backend: Backend, batch: Batch, replica: tf.Tensor
) -> tuple[tuple[Any, Any, Any], tf.Tensor, Any]:
    """A replica's part of its process' slice, its number of rows, and which they are."""
    data = (batch.x, batch.y, batch.sample_weight)
    if len(backend.local_replicas) == 1:
        first_leaf = tf.nest.flatten(batch.x)[0]
        return data, tf.shape(first_leaf, tf.int64)[0], batch.read
    total = backend.replicas
    begin, _ = share(batch.global_rows, backend.local_replicas[0], total)
    start, stop = share(batch.global_rows, replica, total)
    *data, read = cut((*data, batch.read), start - begin, stop - begin)
    return tuple(data), stop - start, read


def global_loss(sums: Sums) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The loss, and that of each output, from sums over all replicas."""
    planned, *totals = sums.losses
    loss = planned + sum(
        tf.math.divide_no_nan(t, w) for t, w in zip(totals, sums.weights, strict=True)
    )
    outputs = [
        tf.where(w == 0, t, tf.math.divide_no_nan(t, w)) for t, w in sums.outputs
    ]
    return loss, outputs


def _moved(old: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
    """A state variable after the weighted mean of what the replicas made of it."""
    if old.dtype.is_integer:
        by = tf.round(by)
    return old + tf.cast(by, old.dtype)
