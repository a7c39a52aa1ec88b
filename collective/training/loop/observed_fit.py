"""Keras' own ``fit`` with observers.

The function of a batch tells of each step, a callback of Keras of everything else. Every
method of an observer runs on every rank, as ``collective.training.loop.observer`` says.

A training that is resumed reads its data from the start: Keras' loop runs over the steps
that were made before, and nothing is computed in them. Where the state comes from ranks that
train, or have trained before, it is taken late: the first step is traced by then, so the
model has all variables, and those ranks have not waited for that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.input.plan import ENDLESS
from collective.training.loop.batch_methods import BatchMethods
from collective.training.loop.callbacks import CallbackMethods
from collective.training.loop.observer import FinishedStep, Observer, methods
from collective.training.loop.position import Position
from collective.training.model.variables import all_variables
from collective.training.steps.batch_function import BatchFunction, Step, StepObserver
from collective.training.steps.program import Program


class ObservedFit(StepObserver):
    """Calls observers at the steps and hooks of one call of ``fit``.

    Args:
        model: The model that is fitted.
        setup: Returns the observers, innermost first, and may set ``position.start``. It is
            called before the first epoch, when the model has its variables; every rank
            calls it.
        gathers: See ``Position``.
        initial_epoch: The epoch with which a new training begins.
        last_step: Steps of the whole training; ``ENDLESS`` if the epochs decide.

    Attributes:
        position: Its epoch and step, for observers.
        callback: For the callbacks of the call.
        tested: The callbacks whose hooks of a validation are called; None where Keras
            calls them.
        late: Takes the state once the first step is traced; None where it is found in
            ``setup``.
        epochs: The number of the epoch before which the training ends.
    """

    def __init__(
        self,
        model: keras.Model,
        backend: Backend,
        setup: Callable[[ObservedFit], Sequence[Observer]],
        *,
        gathers: bool = False,
        initial_epoch: int = 0,
        last_step: int = ENDLESS,
    ):
        self.position = Position(model, backend, gathers, initial_epoch)
        self.callback = _Hooks(self)
        self.tested: CallbackMethods | None = None
        self._observers: Sequence[Observer] = ()
        self._setup, self._last_step = setup, last_step
        self._first = self._whole = 0  # the steps of the epoch, half-open
        self.late: Callable[[], None] | None = None
        self.epochs, self._read, self._batch = 0, 0, 0
        self._resumes = self._is_past = self._has_begun = self._has_joined = False
        self._postponed: tuple[int, int | None] = 0, None  # an epoch that has begun
        self._tested: BatchMethods | None = None
        self._left: contextlib.ExitStack = contextlib.ExitStack()

    def begin(self, epochs: int) -> None:
        """Put the state to start from in place, and have observers begin.

        Args:
            epochs: The number of the epoch before which the training ends.

        Raises:
            UsageError: The state is beyond the last step.
        """
        self.epochs = epochs
        self._observers = self._setup(self)
        if self.late is None:
            self._begin()
        else:
            self._resumes = True

    def _begin(self) -> None:
        position = self.position
        position.restore()
        position.check_before(self._last_step)
        position.put()  # for observers to see,
        initial, self._resumes = position.initial_epoch, position.start is not None
        self._has_begun = True
        self._call("begin")
        if not self._resumes:
            position.begin(0)
        position.put()  # and not to change
        if self.is_over or position.epoch >= self.epochs:
            self._begin_with(max(1, self.epochs))
            self._end_epochs()
        elif position.initial_epoch != initial and not self._resumes:
            self._begin_with(position.initial_epoch)  # as a callback wants

    def _begin_with(self, epoch: int) -> None:
        """Have Keras' loop begin with this epoch, which is not 0."""
        before = keras_compat.model.initial_epoch(self.position.model) or 0
        set_epoch = keras_compat.model.set_initial_epoch
        set_epoch(self.position.model, epoch)
        self._left.callback(set_epoch, self.position.model, before)

    @property
    def is_over(self) -> bool:
        """Return whether no step follows."""
        position = self.position
        return position.stopped or position.step >= self._last_step

    def begin_epoch(self, epoch: int, steps: int | None) -> None:
        """Begin the steps of an epoch, or continue in its middle.

        Args:
            steps: The number of its steps, if it is known.
        """
        position = self.position
        if self.late is not None:
            self._postponed = epoch, steps
            return
        self._is_past = self._resumes and epoch < position.epoch
        if self._is_past:
            return
        self._first = self._read if self._resumes else position.step
        self._whole = ENDLESS if steps is None else self._first + steps
        position.check_within(epoch, self._first, self._whole)
        last = min(self._whole, self._last_step)
        self._call("begin_epoch", epoch, self._first, last)
        position.epoch = epoch
        position.begin_epoch()
        assert position.reports is not None
        position.reports.restore_metrics()
        self._resumes = self._resumes and self._read < position.step

    def read(self, function: BatchFunction, data: Any, spec: Any) -> None:
        """Trace what the other ranks have traced, before it is told of the batch."""
        if function.model is not self.position.model:
            return
        late = self.late
        if late is not None and function.name == "train_step":
            function.trace(data, spec)
            late()
            self.late = None
            if not self._has_joined:
                self._begin()
            self.begin_epoch(*self._postponed)
            self.before_batch()
        elif self.is_reading_over:
            function.trace(data, spec)

    @property
    def is_reading_over(self) -> bool:
        """Return whether this rank has joined, and reads what the others have read."""
        is_behind = self._resumes and self._read < self.position.step
        return self._has_joined and is_behind

    def take_over(self) -> None:
        """Continue from the state of the ranks that this one joins.

        Raises:
            UsageError: The state is beyond the last step.
        """
        self.position.restore()
        self.position.check_before(self._last_step)
        self.position.put()
        self._resumes = self._has_joined = self._has_begun = True

    def reconfigured(self, root: int) -> None:
        """Tell the observers of a change of the ranks; every rank calls it.

        Args:
            root: A rank that has made all steps that any has.
        """
        if not self._has_begun:
            return
        variables = all_variables(self.position.model)
        before = [tf.convert_to_tensor(variable.value) for variable in variables]
        self._call("reconfigured", root)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)  # to see, and not to change

    def leave(self) -> None:
        """End on a rank that leaves a job that continues."""
        self._call("leaving")
        self.close()

    def is_past(self, model: keras.Model, method: str) -> bool:
        """Count a batch that was read; see ``StepObserver``."""
        if not self._resumes or model is not self.position.model:
            return False
        if method == "train_step":
            self._read += 1
            if not self._is_past and self._read > self.position.step:
                self._resumes = False
            return self._resumes
        return self._is_past

    def before_batch(self) -> None:
        """Tell of a step of the training whose batch is not read yet."""
        if self.late is None and (
            not self._resumes
            or (not self._is_past and self._read >= self.position.step)
        ):
            self._call("before_input", self.position.step)

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Tell of a step of the training."""
        if function.name == "train_step" and function.model is self.position.model:
            self._call("before_step", self.position.step)

    def after_step(self, model: keras.Model, method: str, step: Step) -> None:
        """Tell of a step of the training, or of its validation, that has ended."""
        position = self.position
        if model is not position.model or position.reports is None:
            return
        if method == "test_step" and self._tested is not None:
            self._after_test(self._tested, step)
        if method != "train_step":
            return
        position.reports.add(step.report)
        position.reports.returned = step.outputs
        ended = FinishedStep(
            position.step,
            step.begin,
            step.ready,
            step.done,
            time.time(),
            step.report,
            step.data,
        )
        position.step += 1
        self._call("after_step", ended)
        if self._last_step <= position.step < self._whole:
            if not position.stopped:
                self._take_final()
            model.stop_training = True

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """End an epoch, its validation included.

        Args:
            logs: What Keras shows; observers may add to it.
        """
        position = self.position
        if self._is_past or position.reports is None:
            return
        stops_early = position.stopped and position.step < self._last_step
        self._call("end_epoch", epoch, logs)
        position.end_epoch(logs)
        if stops_early or self.is_over or position.epoch >= self.epochs:
            self._end_epochs()
        else:
            self._call("between_epochs")
        if position.step >= self._last_step:  # which no state must contain
            position.model.stop_training = True

    def _end_epochs(self) -> None:
        if self.position.final is None:
            self._take_final()
        self._call("end_epochs")

    def _take_final(self) -> None:
        """Take the state of the end, if an observer asks for it."""
        if methods(self._observers, "end_epochs"):
            self.position.final = self.position.take_whole()

    def begin_test(self) -> None:
        """Begin the validation of an epoch."""
        if self._is_past or self.position.reports is None:
            return
        self._call("before_validation")
        if self.tested is not None:
            self._tested, self._batch = BatchMethods(self.tested, "test"), 0
            self.tested.call("on_test_begin", (self.position.epoch,), {})

    def before_test_batch(self) -> None:
        """Tell of a batch of the validation that is not read yet."""
        if self._tested is not None:
            self._tested.before(self._batch, self.position.epoch)

    def _after_test(self, tested: BatchMethods, step: Step) -> None:
        ended, self._batch = self._batch, self._batch + 1
        if tested.ends(ended, False):
            outputs = keras_compat.data.as_numbers(step.outputs)
            tested.after(lambda: outputs, self.position.epoch)

    def end_test(self, logs: Mapping[str, Any]) -> None:
        """End the validation of an epoch.

        Args:
            logs: What Keras shows of it.
        """
        if self._is_past or self.position.reports is None:
            return
        found = dict(sorted(logs.items()))
        if self._tested is not None:
            tested, self._tested = self._tested, None
            tested.after(lambda: found, self.position.epoch)
            tested.methods.call("on_test_end", (self.position.epoch,), found)
        named = {f"val_{name}": value for name, value in found.items()}
        self._call("after_validation", named)

    def end(self) -> None:
        """Have observers end; every rank calls it."""
        self._call("end")

    def interrupted(self) -> None:
        """Tell observers that an exception ends the call."""
        self._call("interrupted")

    def close(self) -> None:
        """Close all observers, outermost first, each one also if another fails."""
        with self._left as stack:
            for observer in self._observers:
                stack.callback(observer.close)

    def _call(self, name: str, *args: object) -> None:
        for method in methods(self._observers, name):
            method(*args)


class _Hooks(keras.callbacks.Callback):
    """What Keras calls between the steps."""

    def __init__(self, observed: ObservedFit):
        super().__init__()
        self._observed = observed

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Begin the training."""
        self._observed.begin(self.params["epochs"])

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin an epoch."""
        self._observed.begin_epoch(epoch, self.params["steps"])

    def on_train_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a step."""
        self._observed.before_batch()

    def on_test_batch_begin(
        self, batch: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a step of a validation."""
        self._observed.before_test_batch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End an epoch."""
        self._observed.end_epoch(epoch, {} if logs is None else logs)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Begin a validation."""
        self._observed.begin_test()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """End a validation."""
        self._observed.end_test(logs or {})

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """End the training."""
        self._observed.end()
