"""Epochs and steps of a training, and the order of things in each.

Everything else is an observer (``collective.training.observer``): checkpoints, ledger,
timeline, flight recorder, timing, progress, callbacks. An elastic job runs this loop
again after each change of its ranks (``collective.training.elastic.membership``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from collective.errors import UsageError
from collective.training.input import source_errors
from collective.training.input.pipeline import Batch
from collective.training.observer import FinishedStep, Observer, methods
from collective.training.position import Position
from collective.training.step import Step


class Loop:
    """Runs the steps of a training.

    Args:
        position: Where the training is.
        step: The training step.
        batches: This process' slices of the global batches: of first step, last step
            (exclusive), local replicas, and the number of replicas.
        steps_per_epoch: Steps of a whole epoch.
        last_step: Steps of the whole training, over all epochs.
        observers: Called at fixed points, innermost first.
        evaluate: Validation after each epoch, a collective; None for none.
    """

    def __init__(
        self,
        position: Position,
        step: Step,
        batches: Callable[[int, int, range, int], Iterable[Batch]],
        steps_per_epoch: int,
        last_step: int,
        observers: Sequence[Observer] = (),
        evaluate: Callable[[], dict[str, float]] | None = None,
    ):
        self.position = position
        self.step = step
        position.layout = step.layout  # a plan decides what reports hold of metrics
        self.batches = batches
        self.steps_per_epoch = steps_per_epoch
        self.last_step = last_step
        self.epochs = -(-last_step // self.steps_per_epoch)
        self.observers = observers
        self.evaluate = evaluate
        self._before_input = methods(observers, "before_input", outermost_first=True)
        self._before_step = methods(observers, "before_step", outermost_first=True)
        self._after_step = methods(observers, "after_step")

    def run(self) -> None:
        """Trains from the state to start from to the end. Every rank calls it."""
        with contextlib.closing(self):
            self.position.agree()
            self.begin()
            self.train()

    def begin(self, root: int | None = None) -> None:
        """Puts the state to start from in place, and has observers begin.

        Args:
            root: See ``Observer.reconfigured``; None: observers begin.

        Raises:
            UsageError: The state is beyond the last step.
        """
        position = self.position
        position.restore()
        if position.step > self.last_step:
            raise UsageError(
                f"the training is at step {position.step} already, and "
                f"{self.last_step} steps were asked for",
                hint="more --steps or --epochs, or another --checkpoint-dir",
            )
        position.put()  # for observers to see,
        if root is None:
            self._call("begin")
        else:
            self._call("reconfigured", root)
        position.put()  # and not to change

    def train(self) -> None:
        """Trains from the current position to the end.

        A position at the end is valid: what follows the last epoch is then repeated.
        """
        position, backend = self.position, self.position.backend
        try:
            replicas = backend.local_replicas, backend.replicas
            batches = iter(self.batches(position.step, self.last_step, *replicas))
            while position.epoch < self.epochs and not position.stopped:
                self._train_epoch(batches)
            position.final = position.final or position.take()
            self._call("end_epochs", outermost_first=True)
            self.step.finish()
            self._call("end", outermost_first=True)
        except BaseException:
            self._call("interrupted")
            raise

    def close(self) -> None:
        """Closes all observers, outermost first, each one also if another fails."""
        with contextlib.ExitStack() as stack:
            for observer in self.observers:
                stack.callback(observer.close)

    def _train_epoch(self, batches: Iterator[Batch]) -> None:
        position, per_epoch = self.position, self.steps_per_epoch
        epoch = position.epoch
        first, last = epoch * per_epoch, min((epoch + 1) * per_epoch, self.last_step)
        self._call("begin_epoch", epoch, first, last, outermost_first=True)
        position.begin_epoch()
        assert position.averages is not None
        self.step.begin_epoch(position.averages.sums())
        while position.step < last and not position.stopped:
            self._train_step(batches)
        if position.step == last < first + per_epoch and not position.stopped:
            position.final = position.take()
        logs = position.averages.logs()
        if self.evaluate is not None:
            logs |= self._validate(self.evaluate)
        self._call("end_epoch", epoch, logs)
        position.end_epoch(logs)
        if position.epoch < self.epochs and not position.stopped:
            self._call("between_epochs")

    def _train_step(self, batches: Iterator[Batch]) -> None:
        position = self.position
        number = position.step
        for before_input in self._before_input:
            before_input(number)
        begin = time.perf_counter()
        batch = _next(batches)
        ready = time.perf_counter()
        for before_step in self._before_step:
            before_step(number)
        report = self.step(batch, number)
        done, ended = time.perf_counter(), time.time()
        assert position.averages is not None
        position.averages.add(report)
        position.step += 1
        step = FinishedStep(number, begin, ready, done, ended, report)
        for after_step in self._after_step:
            after_step(step)

    def _validate(self, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
        self._call("before_validation", outermost_first=True)
        logs = {f"val_{name}": value for name, value in evaluate().items()}
        self._call("after_validation", logs)
        return logs

    def _call(self, name: str, *args: object, outermost_first: bool = False) -> None:
        for method in methods(self.observers, name, outermost_first=outermost_first):
            method(*args)


def _next(batches: Iterator[Batch]) -> Batch:
    try:
        return next(batches)
    except tf.errors.OpError as error:
        explained = source_errors.explain(error)
        if explained is None:
            raise
        raise explained from None
