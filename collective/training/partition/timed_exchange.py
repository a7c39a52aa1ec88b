"""The exchange of a step, which notes its times and fails on every rank alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from collective.backends.base import Backend
from collective.tensorflow_ops.ranks import run_independently
from collective.training.partition.backend_exchange import BackendExchange
from collective.training.partition.exchange import (
    Exchange,
    Gradients,
    Message,
    Values,
)
from collective.training.partition.own import Own, first_not_finite
from collective.training.step import finite
from collective.training.step.clock import now
from collective.training.virtual.pieces import VirtualReplicas


class TimedExchange(BackendExchange):
    """Notes when its exchanges of the graph that it was made in begin and end.

    Args:
        number: Of the step: the first sum then fails on every rank where one of them is
            not finite on any (``collective.training.step.finite``).
        virtual, axes: As of ``BackendExchange``.
    """

    def __init__(
        self,
        backend: Backend,
        number: tf.Tensor | None = None,
        virtual: VirtualReplicas | None = None,
        axes: Mapping[str, Exchange] | None = None,
    ):
        super().__init__(backend, virtual, axes)
        self._number = number
        self._graph = tf.compat.v1.get_default_graph()
        self._start: tf.Tensor | None = None
        self._stop: tf.Tensor | None = None

    def reduce(self, message: Message) -> list[tf.Tensor]:
        """See ``Exchange``."""
        if tf.compat.v1.get_default_graph() is not self._graph:  # in a loop or branch
            return super().reduce(message)
        values, scattered = message.values, message.scattered
        if self._start is None:
            parts = [tensor for own in (*values, *scattered) for tensor in own.parts]
            with tf.control_dependencies(parts):
                self._start = now()
            if self._backend.overlaps:
                run_independently(self._start)  # a bucket would wait for all gradients
            else:
                with tf.control_dependencies([self._start]):
                    values = [
                        Own([tf.identity(t) for t in own.parts], own.dtype)
                        for own in values
                    ]
        if self._number is None or message.kind != "sum":
            results = super().reduce(replace(message, values=values))
        else:
            number, self._number = self._number, None
            located = self.added("sum", [self._located([*scattered, *values])])
            results = super().reduce(replace(message, values=[*values, located]))
            place = self._of_all_axes(results.pop(len(values)), results)
            checks = self._checks(results, place, number, message.gradients)
            # Without an error, pieces do not wait for those of all other gradients.
            waiting = len(results) if checks else len(values)
            with tf.control_dependencies([place, *checks]):
                results[:waiting] = [tf.identity(t) for t in results[:waiting]]
        with tf.control_dependencies([self._start, *results]):
            self._stop = now()
        return results

    def _of_all_axes(self, place: tf.Tensor, before: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return what the ranks of all groups have located, so that all fail alike."""
        for along in self._axes.values():
            with tf.control_dependencies(before):
                own = along.added("sum", [place])
                (place,) = along.reduce(Message("sum", [own]))
        return place

    def _checks(
        self,
        results: Sequence[tf.Tensor],
        place: tf.Tensor,
        number: tf.Tensor,
        gradients: Gradients,
    ) -> list[tf.Operation]:
        checks = finite.check(place, number, self._backend.of_all)
        if self._backend.rounds_to is not None:
            sums = [[results[i] for i in gradients]]
            checks += finite.check_transport(sums, [*gradients], place, number)
        return checks

    def _located(self, values: Values) -> tf.Tensor:
        """Return a vector with the place of this rank's first value that is not finite."""
        place = first_not_finite(values)
        return finite.at_replica(place, self._backend.of_all)

    def finish(self) -> None:
        """Write what it keeps for the next step, once the step can be applied."""

    def span(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return when the first began and the last ended: float64, seconds since 1970."""
        if self._start is None or self._stop is None:
            moment = now()
            return moment, moment
        return self._start, self._stop
