"""The three parts of a step: local sums, exchange, update.

``Step`` calls one of each in this order and knows no more of them. Here are the protocols
and what goes from one part to the next; the plain parts are ``local_sums``, ``reduction``
and ``update``, all others are in ``collective.training.variants``, and
``collective.training.assemble`` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from collective.training.input.pipeline import Batch
from collective.training.step.found import Found
from collective.training.step.inputs import ReplicaRows, StepInputs
from collective.training.step.passes import TracedPass


class ReplicaSums(NamedTuple):
    """The sums of one replica."""

    sums: Any  # ``Sums`` over its rows; or what the exchange takes that goes with it
    # The first variable whose gradient is not finite; see
    # ``collective.training.step.finite.first_of``.
    not_finite: tf.Tensor
    found: Found  # by the trace of these sums


class LocalSums(Protocol):
    """Makes sums over this process' rows."""

    # The forward and backward pass over some rows, the same on every rank.
    traced: TracedPass
    # Whether a graph with these sums has the number of replicas in it, so that it is
    # traced again for another number.
    counts_replicas: bool

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """Inside ``Backend.run``: what this replica computes of its process' rows.

        Args:
            batch: ``without_none``.
            replica: int64 scalar, the replica's number.
        """
        ...

    def __call__(self, inputs: StepInputs) -> ReplicaSums:
        """Inside ``Backend.run``: the sums of this replica."""
        ...


class StepSums(NamedTuple):
    """What a step sums over replicas."""

    sums: Any  # losses, gradients, metrics, state
    not_finite: tf.Tensor  # see ``collective.training.step.finite.at_replica``
    attached: list[list[tf.Tensor]]  # the tensors of each attachment


class Span(NamedTuple):
    """When the all-reduce started and stopped: float64 scalars, seconds since 1970."""

    start: tf.Tensor
    stop: tf.Tensor


class Exchange(Protocol):
    """Sums over all replicas."""

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``: the sums, and the time that the exchange took."""
        ...


class Update(Protocol):
    """Makes new variables from gradients of the global loss."""

    def check(self, found: Found) -> None:
        """Refuses what it cannot update, once the pass was traced.

        Raises:
            UsageError: A layer sets a variable that this part has a shard of.
        """
        ...

    def apply(self, gradients: Sequence[Any], indices: Sequence[int], /) -> None:
        """Inside ``Backend.run``: un-scales, clips, updates, constrains, averages.

        Args:
            gradients: Sums over all replicas, divided by the global weight.
            indices: Of each one's variable in ``PreparedModel.trainable``.
        """
        ...

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        ...
