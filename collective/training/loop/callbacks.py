"""Keras callbacks in a job of many ranks: called on rank 0, followed by all.

Files are written once and decisions taken once. What a callback can change
(``stop_training``, the learning rate, weights, the logs of an epoch) is broadcast after
each method that some callback overrides, and so is the exception that a callback raises: the
caller of ``collective.fit`` gets it on every rank. A collective inside a callback would
wait for ranks that do not call it; it raises instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from collective import recorder
from collective.backends.base import Backend
from collective.errors import CollectiveError, UsageError
from collective.training import keras_compat
from collective.training.keras_compat.batch_functions import keras_own
from collective.training.loop import callback_state
from collective.training.loop.callback_shards import CallbackShards
from collective.training.loop.observer import FinishedStep, Observer
from collective.training.loop.position import Position
from collective.training.model.prepared import get_partition
from collective.training.model.variables import (
    check_frozen_layers,
    outside_variables,
    replicated_variables,
)
from collective.training.process import failure, host_random
from collective.training.process.object_collectives import broadcast_object

_STOPS = ("stop_training", "stop_evaluating", "stop_predicting")
METHODS = tuple(
    f"on_{what}_{when}"
    for what in (
        *("train", "epoch", "train_batch", "test", "test_batch"),
        *("predict", "predict_batch"),
    )
    for when in ("begin", "end")
)
# Keras' older names, which these methods call unless they are overridden themselves.
_ALIASES = {
    "on_train_batch_begin": "on_batch_begin",
    "on_train_batch_end": "on_batch_end",
}

Callbacks = Any
"""What ``keras.Model.fit`` takes: None, a callback, a list, or a ``CallbackList``."""


def flatten(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Return the callbacks, each by itself."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return keras.tree.flatten(callbacks) if callbacks else []


def expects_nan(callbacks: Callbacks, backend: Backend) -> bool:
    """Return whether a callback of rank 0 ends the training at a loss that is not finite."""
    kind = keras.callbacks.TerminateOnNaN
    mine = any(isinstance(callback, kind) for callback in flatten(callbacks))
    return bool(backend.broadcast_array(np.array([mine]))[0])


class CallbackMethods:
    """Calls methods on rank 0, and makes every rank follow.

    Args:
        callbacks: The user's. Rank 0's count; other ranks may have none.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        model: keras.Model,
        backend: Backend,
        params: Mapping[str, Any],
    ):
        self.batches = 0  # of the pass, so far
        #: Whether rank 0's weights reach the other ranks later: a model may have its
        #: variables on all ranks only when its first step is traced.
        self.is_shared_later = False
        self.callbacks = flatten(callbacks)
        # Whether the callbacks are Keras' own list, which has a progress bar.
        self.has_bar = isinstance(callbacks, keras.callbacks.CallbackList)
        self.model = model
        self.backend = backend
        self.params = dict(params)
        # The methods that a callback of rank 0 overrides; after ``agree``.
        self.used: set[str] = set()
        self._known: list[keras.Variable] = []
        self._trainable = keras_compat.model.trainable_flags(model)
        self._shards = CallbackShards(model, backend, len(_STOPS) + 4)
        self._ready = False
        self._functions: dict[str, Any] = {}  # Keras' own, that callbacks call
        self._state = callback_state.CallbackState(self.callbacks)
        self._last: dict[str, tuple[int, ...]] = {}  # where each method was called last

    @property
    def _variables(self) -> list[keras.Variable]:
        """Return the variables that callbacks may assign.

        They are in the order of the first call in which the model has them all, since
        the order depends on the layers that are trainable.
        """
        if _optimizer(self.model) is None:
            found = list(self.model.variables)
        else:
            found = replicated_variables(self.model)
        if len(found) != len(self._known):
            self._known = found
        return self._known

    def agree(self) -> None:
        """Give the callbacks their model, and find out which methods matter.

        Rank 0 decides: a script may make callbacks there only. Every rank calls it.
        """
        if self.backend.rank == 0 and not self._ready:
            self._ready = True
            if self.backend.size > 1:
                self._state.begin()
            for callback in self.callbacks:
                callback.set_params(self.params)
                callback.set_model(self.model)
        mine = [
            any(_overrides(c, method) for c in self.callbacks) for method in METHODS
        ]
        agreed = self.backend.broadcast_array(np.array(mine, np.float32))
        self.used = {
            method for method, used in zip(METHODS, agreed, strict=True) if used
        }
        if {"on_train_batch_begin", "on_train_batch_end"} & self.used:
            self.used.add("on_epoch_end")  # broadcasts what methods of batches changed

    def call(self, method: str, place: tuple[int, ...], *args: Any) -> None:
        """Run a method on rank 0; afterwards all ranks have the same model again.

        After methods of a batch what ends the training and the learning rate are
        broadcast; after all others, the end of the epoch among them, and where a method of
        a batch has assigned a variable, every variable of model and optimizer is. No method
        is called twice for the same place, though an elastic job repeats what a dead rank
        has interrupted.

        Args:
            place: Epoch, batch; what distinguishes two calls.
            args: What Keras gives to it: epoch or batch number, logs.

        Raises:
            Exception: What a callback raised, on every rank.
        """
        if method not in self.used:
            return
        error: Exception | None = None
        drawn = assigned = False
        if self.backend.rank == 0 and self._last.get(method) != place:
            self._last[method] = place
            drawn, assigned, error = self._run_and_look(method, args)
        if self.backend.size == 1:
            self._shards.put()
            if error is not None:
                raise error
            return
        stops = [float(getattr(self.model, name, False)) for name in _STOPS]
        trainable = keras_compat.model.trainable_flags(self.model)
        changed = trainable != self._trainable
        found = changed, drawn, assigned, error is not None
        flags = np.array([*stops, *map(float, found)])
        *agreed, changed, drawn, assigned, failed = self._shards.agree(flags)
        if failed:
            raise failure.share(error, f"a callback's {method}", self.backend)
        for name, mine, value in zip(_STOPS, stops, agreed, strict=True):
            if mine != value:
                setattr(self.model, name, bool(value))
        if changed:
            self._trainable = list(self.backend.broadcast_array(np.array(trainable)))
            keras_compat.model.set_trainable_flags(self.model, self._trainable)
        if drawn:
            host_random.share(self.backend)
        self._follow(method, bool(assigned))

    def _run_and_look(
        self, method: str, args: tuple[Any, ...]
    ) -> tuple[bool, bool, Exception | None]:
        """Like ``_run``; also finds what other ranks then lack: random numbers, assigned weights.

        Between batches, numbers are not looked at: threads that read data draw, too.
        At all other times every rank gets the weights anyway.
        """
        if self.backend.size == 1:
            return False, False, self._run(method, args)
        if "batch" in method or method.startswith("on_predict"):
            with keras_compat.model.assignments() as seen:
                error = self._run(method, args)
            optimizer = _optimizer(self.model)
            rates = _learning_rate(optimizer) if optimizer is not None else []
            watched = set(map(id, self._variables)) - set(map(id, rates))
            return False, bool(seen & watched), error
        before = host_random.state()
        error = self._run(method, args)
        return host_random.drawn_since(before), False, error

    def _on_one_device(self) -> contextlib.AbstractContextManager[None]:
        """Enter one device around methods, if a strategy has the model on several."""
        if getattr(self.backend, "strategy", None) is None:
            return contextlib.nullcontext()
        return keras_compat.one_copy.on_one_device()

    def _run(self, method: str, args: tuple[Any, ...]) -> Exception | None:
        """Call the method; return the exception of a callback, for all ranks to raise.

        Raises at once if a callback used a collective, which the others do not.
        """
        what = f"a callback's {method}"
        with (
            self.backend.only_rank_zero(what),
            recorder.span(recorder.OTHER, what),
            keras_own(self.model, self._functions),
            self._shards.whole(),
            self._on_one_device(),
        ):
            try:
                if method == "on_train_begin":
                    self._state.begin_training()
                else:
                    for callback in self.callbacks:
                        _call(callback, method, args)
            except CollectiveError:
                raise
            except Exception as error:
                return error
        if "batch" not in method and _optimizer(self.model) is not None:
            check_frozen_layers(self.model, method)
        return None

    def _follow(self, method: str, assigned: bool) -> None:
        """Give every rank whatever the method may have changed on rank 0."""
        if method.startswith(("on_test_batch", "on_predict")) and not assigned:
            return
        if self.is_shared_later:
            return
        self.backend.broadcast(outside_variables(self.model))
        if "batch" in method and not assigned:
            self.backend.broadcast(_learning_rate(self.model.optimizer))
            return
        self.backend.broadcast(self._variables)
        parts = get_partition(self.model)
        if parts is not None:
            parts.broadcast_shards()

    def share_state(self) -> None:
        """Give every rank what rank 0's callbacks have gathered; every rank calls it."""
        if self.backend.size > 1 and self.used:
            self._state.share(self.backend, self.model, self.params)

    def share_memory(self) -> None:
        """Like ``share_state``, for a rank that becomes rank 0 in the middle of a training.

        It then continues after the last method. Every rank calls it.
        """
        if self.backend.size == 1 or not self.used:
            return
        last = broadcast_object(self.backend, self._last)
        if self._state.share(self.backend, self.model, self.params):
            last.pop("on_train_begin", None)  # see CallbackState.begin_training
            self._last = last if self.backend.rank else self._last

    def agreed_logs(self, method: str, logs: dict[str, Any]) -> dict[str, Any]:
        """Rank 0's logs, on every rank: a callback may have added to them."""
        if method not in self.used or self.backend.size == 1:
            return logs
        return broadcast_object(self.backend, logs)


class BatchMethods:
    """The methods of the batches of one pass: ``train``, ``test`` or ``predict``.

    Keras runs ``steps_per_execution`` batches at a time, and calls methods before the first
    and after the last of them.
    """

    def __init__(self, methods: CallbackMethods, what: str):
        self.methods = methods
        self._begin = f"on_{what}_batch_begin"
        self._end = f"on_{what}_batch_end"
        self._open: int | None = None  # the first batch of those that run
        self._ran = False  # whether any of them has run

    def before(self, batch: int, *place: int) -> None:
        """Before a batch, counted from 0."""
        if not self._called:
            return
        if batch % self._together == 0:
            self._open, self._ran = batch, False
            self.methods.call(self._begin, (*place, batch), batch, {})

    def ends(self, batch: int, last: bool) -> bool:
        """After a batch: whether methods follow it."""
        self.methods.batches = batch + 1
        if not self._called:
            return False
        self._ran = True
        return last or (batch + 1) % self._together == 0

    def after(self, logs: Callable[[], dict[str, Any]], *place: int) -> None:
        """After the last of the batches that Keras runs at a time; ``logs`` makes the logs."""
        if self._open is None or not self._ran:
            return
        methods, number, self._open = (
            self.methods,
            self._open + self._together - 1,
            None,
        )
        shown = self._end in methods.used and methods.backend.rank == 0
        sorted_logs = dict(sorted(logs().items())) if shown else {}
        methods.call(self._end, (*place, number), number, sorted_logs)

    @property
    def _called(self) -> bool:
        return bool({self._begin, self._end} & self.methods.used)

    @property
    def _together(self) -> int:
        return int(getattr(self.methods.model, "steps_per_execution", 1) or 1)


class RankZeroCallbacks(Observer):
    """Runs methods on rank 0, and makes every rank follow what they decided."""

    def __init__(
        self, callbacks: Callbacks, position: Position, params: dict[str, Any]
    ):
        self.position = position
        self.model = position.model
        self.backend = position.backend
        # Calls them, also those of the validation.
        self.methods = CallbackMethods(callbacks, self.model, self.backend, params)
        self._batches = BatchMethods(self.methods, "train")
        self._epoch = self._first = self._stop = 0
        self._logs: dict[str, Any] = {}  # of the last epoch
        # Which layers the step trains; until the first step.
        self._trained: list[bool] | None = keras_compat.model.trainable_flags(
            self.model
        )
        self.model.stop_training = False

    def begin(self) -> None:
        """Find out which methods matter, and call ``on_train_begin``.

        There a callback may say with which epoch the training begins
        (``BackupAndRestore``).
        """
        self.methods.agree()
        self.methods.call("on_train_begin", (), {})
        initial = (
            keras_compat.model.initial_epoch(self.model) or self.position.initial_epoch
        )
        agreed = self.backend.broadcast_array(np.array([float(initial)]))
        self.position.initial_epoch = int(agreed[0])

    def reconfigured(self, root: int) -> None:
        """Like ``begin``, because another rank may have become rank 0."""
        self.begin()

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Call ``on_epoch_begin``."""
        self._epoch, self._first, self._stop = epoch, first, last
        self.methods.call("on_epoch_begin", (epoch,), epoch, {})

    def before_input(self, number: int) -> None:
        """Call ``on_train_batch_begin``; refuse what changed the trained layers before."""
        if self._trained is not None:
            if self._trained != keras_compat.model.trainable_flags(self.model):
                raise UsageError(
                    "a callback's on_train_begin, or another method before the first step, has "
                    "changed layer.trainable",
                    hint="set it before collective.fit, and compile the model",
                )
            self._trained = None
        self._batches.before(number - self._first, self._epoch)

    def after_step(self, step: FinishedStep) -> None:
        """Call ``on_train_batch_end``."""
        last = step.number + 1 == self._stop
        if self._batches.ends(step.number - self._first, last):
            self._end_batches()

    def before_validation(self) -> None:
        """Call ``on_train_batch_end`` if the epoch ended unexpectedly."""
        self._end_batches()

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Call ``on_epoch_end``, and take over what callbacks add to the logs."""
        self._end_batches()
        self.methods.call("on_epoch_end", (epoch,), epoch, logs)
        agreed = self.methods.agreed_logs("on_epoch_end", logs)
        if agreed is not logs:
            logs.clear()
            logs.update(agreed)
        self._logs = dict(logs)

    def end(self) -> None:
        """Call ``on_train_end``."""
        self.methods.call("on_train_end", (), dict(self._logs))
        self.methods.share_state()

    def _end_batches(self) -> None:
        reports = self.position.reports

        def logs() -> dict[str, Any]:
            return {} if reports is None else reports.logs()

        self._batches.after(logs, self._epoch)


def _call(
    callback: keras.callbacks.Callback, method: str, args: tuple[Any, ...]
) -> None:
    """Call a method as Keras does: the logs of a batch by name, all others by place."""
    if "batch" in method:
        batch, logs = args
        getattr(callback, method)(batch, logs=logs)
    else:
        getattr(callback, method)(*args)


def _optimizer(model: keras.Model) -> keras.Optimizer | None:
    return getattr(model, "optimizer", None)


def _learning_rate(optimizer: keras.Optimizer) -> list[keras.Variable]:
    return [v for v in optimizer.variables if v.name == "learning_rate"]


def _overrides(callback: keras.callbacks.Callback, method: str) -> bool:
    for name in {method, _ALIASES.get(method, method)}:
        base = getattr(keras.callbacks.Callback, name)
        if getattr(getattr(callback, name), "__func__", None) is not base:
            return True
    return False
