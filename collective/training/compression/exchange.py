"""The exchange and the update of a step with a communication hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.compression.hook import Exchanged
from collective.training.compression.state import HookState
from collective.training.prepared import PreparedModel
from collective.training.step.clock import now
from collective.training.step.found import Found
from collective.training.step.parts import Span, StepSums
from collective.training.step.reduction import AllReduce, sum_tensors
from collective.training.step.update import KerasUpdate, divided


class HookExchange(AllReduce):
    """An all-reduce in which a hook sums the gradients that it compresses.

    Args:
        dtype: As for ``AllReduce``.
        prepared: The model, with the state of the hook.

    Attributes:
        gradients: Of the last trace: those of the global loss, of connected variables.
        compressed, inputs, done: Likewise: the variables whose gradients the hook has
            summed, what it was given, and what it has made of them.
    """

    def __init__(self, backend: Backend, dtype: tf.DType, prepared: PreparedModel):
        super().__init__(backend, dtype)
        assert prepared.hook is not None
        self.state: HookState = prepared.hook
        self.prepared = prepared

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``: sums of all but gradients, and the time that it took.

        In the sums, gradients are local still: ``HookUpdate`` takes those of this object.
        """
        self.compressed = [i for i in found.connected if i in self.state.errors]
        own = local.sums.gradients
        before: list[tf.Tensor] = []  # one collective after the other
        if local.sums.weights:
            before = list(self.backend.all_reduce(local.sums.weights))
            with tf.control_dependencies(before):
                local = tf.nest.map_structure(tf.identity, local)
        weighed = local.sums._replace(weights=before)
        given = {
            i: tf.cast(gradient, self.dtype)
            for i, gradient in zip(
                found.connected,
                divided(weighed, found, self.prepared),
                strict=True,
            )
        }
        whole = [i for i in found.connected if i not in self.compressed]
        results: list[tuple[StepSums, Span]] = []

        def all_reduce(tensors: Sequence[Any]) -> list[Any]:
            nonlocal before
            if results:
                with tf.control_dependencies(before):
                    tensors = [tf.identity(t) for t in tensors]
                before = sums = sum_tensors(self.backend, tensors, [])
                return sums
            sent = [*(given[i] for i in whole), *tensors]
            first = local._replace(sums=local.sums._replace(gradients=[sent]))
            results.append(AllReduce.__call__(self, first, found))
            before = tf.nest.flatten(results[0][0])
            return results[0][0].sums.gradients[0][len(whole) :]

        self.inputs = [given[i] + self.state.errors[i] for i in self.compressed]
        self.done = Exchanged([], [], [])
        if self.compressed:
            shared = [
                [*map(tf.identity, self.state.shared[i])] for i in self.compressed
            ]
            self.done = self.state.hook.exchange(self.inputs, shared, all_reduce)
        if not results:
            all_reduce([])
        total, span = results[0]
        sums = dict(zip(whole, total.sums.gradients[0], strict=False))
        sums |= dict(zip(self.compressed, self.done.totals, strict=True))
        self.gradients = [sums[i] for i in found.connected]
        with tf.control_dependencies([span.stop, *before, *self.gradients]):
            stop = now()
        total = total._replace(sums=total.sums._replace(gradients=own))
        return total, Span(span.start, stop)


class HookUpdate(KerasUpdate):
    """Keras' optimizer with the gradients of a hook, and the hook's new state.

    Both are written after the checks of the step, so that a step is whole or absent.
    """

    def __init__(self, prepared: PreparedModel, exchange: HookExchange):
        super().__init__(prepared, exchange.backend)
        self.exchange = exchange

    def apply(self, gradients: Sequence[Any], indices: Sequence[int]) -> None:
        """Inside ``Backend.run``: as ``KerasUpdate``; the local gradients are not used."""
        exchange = self.exchange
        restored = [
            tf.cast(g, self.variables[i].dtype)
            for i, g in zip(indices, exchange.gradients, strict=False)
        ]
        super().apply([*restored, *gradients[len(restored) :]], indices)
        exchange.state.assign(exchange.compressed, exchange.inputs, exchange.done)
