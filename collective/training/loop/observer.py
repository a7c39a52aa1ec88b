"""What happens beside a training: observers, which the loop calls at fixed points.

Checkpoints, the ledger, the timeline, progress, callbacks and elastic membership are one
observer each. An observer that was not asked for does not exist, and the loop skips
methods that an observer does not override.

Observers form layers around a step, the first in the list innermost. The loop calls
``before_*`` from the outermost to the innermost, ``after_*`` and ``end_epoch`` from the
innermost to the outermost. ``begin`` runs in the order of the list; ``end`` and ``close``
in the reverse order, as in a ``contextlib.ExitStack``.

Every method runs on every rank, at the same point of the training; those that may use
collectives say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from collective.training.input.pipeline import Batch


class FinishedStep(NamedTuple):
    """A step that every rank has finished."""

    number: int  # of the step, from 0, over all epochs
    # When the loop began to wait for its batch; seconds of ``time.perf_counter``, as
    # the next two.
    begin: float
    ready: float  # when it had the batch
    done: float  # when the step had returned
    ended: float  # as ``done``, in seconds since the epoch (``time.time``)
    report: (
        tf.Tensor
    )  # what the step returned, see ``collective.training.steps.report``
    batch: Batch  # what this process has given it


class Observer:
    """Base class of all observers; no method does anything."""

    def begin(self) -> None:
        """Act before the first step, with the state to start from in place. Collectives.

        What this method changes in the model is undone.
        """

    def reconfigured(self, root: int) -> None:
        """Act like ``begin``, after ranks joined, left or died; only in elastic jobs.

        A rank that joins a running job gets this call instead of ``begin``.

        Args:
            root: The first rank that has finished the last step; every rank continues
                from its state.
        """

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Act before the steps of an epoch, or the rest of them. Collectives.

        Args:
            epoch: Its number, from 0.
            first, last: Its steps, half-open, as step numbers of the whole training.
        """

    def before_input(self, number: int) -> None:
        """Act before the loop waits for the batch of a step. Collectives."""

    def before_step(self, number: int) -> None:
        """Act between input and step. No collectives."""

    def after_step(self, step: FinishedStep) -> None:
        """Act after a step; the position is that of the next one. Collectives."""

    def before_validation(self) -> None:
        """Act after the steps of an epoch, if there are validation data. Collectives."""

    def after_validation(self, logs: dict[str, float]) -> None:
        """Act after the validation, whose results are named ``val_*``. Collectives."""

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Act after steps and validation, before the epoch counts as finished. Collectives.

        ``logs`` are averages over the epoch, with the results of the validation.
        """

    def between_epochs(self) -> None:
        """Act once an epoch counts as finished and another one follows. Collectives."""

    def end_epochs(self) -> None:
        """Act after the last epoch, before Keras finalizes the variables. Collectives."""

    def end(self) -> None:
        """Act once the model is final. Collectives."""

    def interrupted(self) -> None:
        """Act when an exception ends the training, or an elastic attempt. No collectives."""

    def leaving(self) -> None:
        """Act as this rank leaves a job that continues without it. No collectives."""

    def close(self) -> None:
        """Release files and locks, also after an exception; maybe twice. No collectives."""


METHODS = tuple(n for n, v in vars(Observer).items() if callable(v) and n[0] != "_")
_OUTERMOST_FIRST = (
    *("begin_epoch", "before_input", "before_step", "before_validation"),
    *("end_epochs", "end"),
)


def methods(observers: Sequence[Observer], name: str) -> list[Callable[..., Any]]:
    """Return the bound methods of this name in their order, without those that do nothing."""
    ordered = reversed(observers) if name in _OUTERMOST_FIRST else observers
    nothing = getattr(Observer, name)
    return [getattr(o, name) for o in ordered if getattr(type(o), name) is not nothing]
