"""Epochs and steps of a training, and the order of things in each.

Everything else is an observer (``collective.training.loop.observer``): checkpoints, ledger,
timeline, flight recorder, timing, progress, callbacks. An elastic job runs this loop
again after each change of its ranks (``collective.training.observers.elastic.membership``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from collective.training.input.feed import ENDLESS, Feed
from collective.training.input.pipeline import Batch
from collective.training.input.source import explain
from collective.training.loop.observer import METHODS, FinishedStep, Observer, methods
from collective.training.loop.position import Position
from collective.training.process import interrupts
from collective.training.step.report_layout import Layout


class TrainingStep(Protocol):
    """What the loop asks of a step; see ``collective.training.steps.partitioned_step``."""

    @property
    def layout(self) -> Layout:
        """Return the meaning of the numbers of a report."""
        ...

    def __call__(self, batch: Batch, number: int) -> Any:
        """Train on one global batch; return the report."""
        ...

    def begin_epoch(self, last: np.ndarray | None = None) -> None:
        """Set metrics to zero, or continue an epoch from its last report."""
        ...

    def overrun(self) -> None:
        """Do what a step of Keras does before it finds that there is no batch for it."""
        ...

    def trace(self) -> None:
        """Trace what the first call would trace; run nothing."""
        ...

    def finish(self) -> None:
        """Do what Keras does at the end of ``fit``; every rank calls it."""
        ...


@dataclass
class Loop:
    """Runs the steps of a training."""

    position: Position
    step: TrainingStep
    feed: Feed
    epochs: int  # epochs of the whole training; ``ENDLESS`` where steps decide
    # Steps of the whole training, over all epochs; ``ENDLESS`` if the number of
    # epochs decides.
    last_step: int
    observers: Sequence[Observer] = ()  # called at fixed points, innermost first
    # Validates after an epoch, as a collective; None without validation.
    validate: Callable[[], dict[str, float]] | None = None
    # From the number of an epoch, whether ``validate`` follows it.
    validated: Callable[[int], bool] = lambda epoch: True

    def __post_init__(self) -> None:
        self.position.layout = self.step.layout
        self._methods = {name: methods(self.observers, name) for name in METHODS}

    def run(self) -> None:
        """Train from the state to start from to the end. Every rank calls it."""
        with contextlib.closing(self):
            self.position.agree()
            self.begin()
            self.train()

    def begin(self, root: int | None = None) -> None:
        """Put the state to start from in place, and have observers begin.

        Args:
            root: See ``Observer.reconfigured``. If None, observers begin.

        Raises:
            UsageError: The state is beyond the last step.
        """
        position = self.position
        position.restore()
        position.check_before(self.last_step)
        position.put()  # for observers to see,
        if root is None:
            self._call("begin")
        else:
            self._call("reconfigured", root)
        if position.start is None:
            position.begin(self.feed.bounds(position.initial_epoch, 0)[0])
        position.put()  # and not to change

    def train(self) -> None:
        """Train from the current position to the end.

        A position at the end is valid: what follows the last epoch is then repeated.
        """
        position, backend = self.position, self.position.backend
        try:
            replicas = backend.local_replicas, backend.replicas
            ended = position.epoch - position.initial_epoch
            place = ended, position.step
            self.feed.start(place, self.last_step, *replicas)
            while not self._ended:
                self._train_epoch()
            position.final = position.final or position.take_whole()
            self._call("end_epochs")
            self.step.finish()
            self._call("end")
        except BaseException:
            self._call("interrupted")
            raise

    def close(self) -> None:
        """Close all observers, outermost first, each one also if another fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.feed.close)
            for observer in self.observers:
                stack.callback(observer.close)

    @property
    def _ended(self) -> bool:
        position = self.position
        if position.stopped or self.feed.ended:
            return True
        if self.epochs == ENDLESS:
            return position.step >= self.last_step
        return position.epoch >= self.epochs

    def _train_epoch(self) -> None:
        position, epoch = self.position, self.position.epoch
        first, whole = self.feed.bounds(epoch, position.step)
        last = min(whole, self.last_step)
        position.check_within(epoch, first, whole)
        self._call("begin_epoch", epoch, first, last)
        position.begin_epoch()
        assert position.reports is not None
        self.step.begin_epoch(position.reports.last())
        batches = self.feed.epoch(last - position.step)
        while position.step < last and not position.stopped:
            if not self._train_step(batches):
                break  # the data have ended
        if position.step == last:
            next(batches, None)  # the data learn that the epoch has ended
        if self.feed.overran and not position.stopped:
            self.step.overrun()
        if self.feed.ended:
            position.reports = None  # before the first step of the epoch
            return
        if position.step == last < whole and not position.stopped:
            position.final = position.take_whole()
        logs = position.reports.logs()
        if self.validate is not None and self.validated(epoch):
            logs |= self._validate(self.validate)
        logs = dict(sorted(logs.items()))  # as Keras has them
        self._call("end_epoch", epoch, logs)
        position.end_epoch(logs)
        if not self._ended:
            self._call("between_epochs")

    def _train_step(self, batches: Iterator[Batch]) -> bool:
        """Train on the next batch; return False if there is none."""
        interrupts.check()
        position = self.position
        number = position.step
        self._call("before_input", number)
        begin = time.perf_counter()
        batch = _next(batches)
        if batch is None:
            return False
        ready = time.perf_counter()
        self._call("before_step", number)
        report = self.step(batch, number)
        done, ended = time.perf_counter(), time.time()
        assert position.reports is not None
        position.reports.add(report)
        position.step += 1
        step = FinishedStep(number, begin, ready, done, ended, report, batch)
        self._call("after_step", step)
        return True

    def _validate(self, validate: Callable[[], dict[str, float]]) -> dict[str, float]:
        self._call("before_validation")
        logs = {f"val_{name}": value for name, value in validate().items()}
        self._call("after_validation", logs)
        return logs

    def _call(self, name: str, *args: object) -> None:
        for method in self._methods[name]:
            method(*args)


def _next(batches: Iterator[Batch]) -> Batch | None:
    try:
        return next(batches, None)
    except tf.errors.OpError as error:
        explained = explain(error)
        if explained is None:
            raise
        raise explained from None
