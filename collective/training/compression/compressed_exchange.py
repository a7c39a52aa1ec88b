"""The exchange of a step with a communication hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.compression.hook import Exchanged
from collective.training.compression.hook_state import HookState
from collective.training.partition.exchange import Gradients, Values
from collective.training.partition.timed_exchange import TimedExchange


class HookExchange(TimedExchange):
    """Sums in which a hook sums the gradients that it compresses.

    Args:
        number: As for ``TimedExchange``.
        state: The state that the hook keeps between steps.
    """

    def __init__(self, backend: Backend, number: tf.Tensor | None, state: HookState):
        super().__init__(backend, number)
        self._state = state
        # The results of each message, which are written when the step can be applied.
        self._done: list[tuple[list[int], list[tf.Tensor], Exchanged]] = []

    def _sums(self, values: Values, gradients: Gradients) -> list[tf.Tensor]:
        state, tensors = self._state, [own.parts[0] for own in values]
        indices = {i: state.index_of(variable) for i, variable in gradients.items()}
        places = [i for i, index in indices.items() if index in state.errors]
        if not places:
            return super()._sums(values, gradients)
        compressed = [indices[i] for i in places]
        errors = [state.errors[index] for index in compressed]
        inputs = [
            tf.cast(tensors[i], error.dtype) + error
            for i, error in zip(places, errors, strict=True)
        ]
        rest = [i for i in range(len(tensors)) if i not in places]
        results: dict[int, tf.Tensor] = {}
        before: list[tf.Tensor] = []
        is_sent = False

        def all_reduce(own: Sequence[Any]) -> list[Any]:
            """Sum tensors after the message before; the first message takes the rest along."""
            nonlocal before, is_sent
            with tf.control_dependencies(before):
                own = [tf.identity(t) for t in own]
            if is_sent:
                before = self._sum_plainly(own)
                return before
            before = self._sum_plainly([*(tensors[i] for i in rest), *own])
            is_sent = True
            results.update(zip(rest, before, strict=False))
            return before[len(rest) :]

        shared = [[*map(tf.identity, state.shared[index])] for index in compressed]
        done = state.hook.exchange(inputs, shared, all_reduce)
        if not is_sent:
            all_reduce([])
        for i, total in zip(places, done.totals, strict=True):
            results[i] = tf.cast(total, values[i].dtype)
        self._done.append((compressed, inputs, done))
        return [results[i] for i in range(len(tensors))]

    def _sum_plainly(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return super()._sums([self.added("sum", [t]) for t in tensors], {})

    def finish(self) -> None:
        """Write the hook's new state after the checks, so that a step is whole or absent."""
        for compressed, inputs, done in self._done:
            self._state.assign(compressed, inputs, done)
