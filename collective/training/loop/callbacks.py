"""Keras callbacks in a job of many ranks: called on rank 0, followed by all.

Files are written once and decisions taken once. What a callback can change
(``stop_training``, the learning rate, weights, the logs of an epoch) is broadcast after
each method that some callback overrides, and so is the exception that a callback raises: the
caller of ``collective.fit`` gets it on every rank. A collective inside a callback would
wait for ranks that do not call it; it raises instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.errors import CollectiveError
from collective.training import keras_compat
from collective.training.keras_compat.batch_functions import keras_own
from collective.training.loop import callback_state
from collective.training.loop.callback_parts import CallbackParts
from collective.training.model.variables import (
    check_frozen_layers,
    outside_variables,
    replicated_variables,
)
from collective.training.partition.undo import whole_or_absent
from collective.training.process import failure, host_random
from collective.training.process.object_collectives import broadcast_object
from collective.training.process.unit import Unit, at_once

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


@dataclass
class _Ran:
    """What a method of callbacks has done on rank 0."""

    has_drawn: bool = False  # random numbers
    has_assigned: bool = False  # a variable, in a method of a batch
    error: Exception | None = None


@dataclass
class _Outcome:
    """What a method has done, for all ranks to follow.

    Attributes:
        stops: The values of ``_STOPS``.
        trainable: The flags of the layers; None if they are as before.
        random: The state of the generators; None if it is as before.
        error: What was raised, as ``failure.sent`` returns it.
    """

    stops: list[float]
    trainable: list[bool] | None = None
    random: Any = None
    error: tuple[bytes, str] | None = None


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
        unit: Runs what all ranks do together, again where one of them has died; returns
            None on a rank that takes no part.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        model: keras.Model,
        backend: Backend,
        params: Mapping[str, Any],
        unit: Unit = at_once,
    ):
        self._unit = unit
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
        self._parts = CallbackParts(backend, len(_STOPS) + 4)
        self._ready = False
        self._functions: dict[str, Any] = {}  # Keras' own, that callbacks call
        self._state = callback_state.CallbackState(self.callbacks)
        self._last: dict[str, tuple[int, ...]] = {}  # where each method was called last

    @property
    def _has_others(self) -> bool:
        """Return whether there are other ranks, or were some, or may be."""
        return self.backend.size > 1 or self.backend.elastic

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

        def agreed() -> list[bool]:
            self._make_ready()
            mine = [
                any(_overrides(c, method) for c in self.callbacks) for method in METHODS
            ]
            return list(self.backend.broadcast_array(np.array(mine)))

        found = self._unit(agreed)
        self.used = {
            method for method, used in zip(METHODS, found, strict=True) if used
        }
        if {"on_train_batch_begin", "on_train_batch_end"} & self.used:
            self.used.add("on_epoch_end")  # broadcasts what methods of batches changed

    def _make_ready(self) -> None:
        if self.backend.rank == 0 and not self._ready:
            self._ready = True
            if self._has_others:
                self._state.begin()
            for callback in self.callbacks:
                callback.set_params(self.params)
                callback.set_model(self.model)

    def call(self, method: str, place: tuple[int, ...], *args: Any) -> None:
        """Run a method on rank 0; afterwards all ranks have the same model again.

        After methods of a batch what ends the training and the learning rate are
        broadcast; after all others, the end of the epoch among them, and where a method of
        a batch has assigned a variable, every variable of model and optimizer is. No method
        is called twice for the same place, though an elastic job repeats what a dead rank
        has interrupted. If rank 0 dies in the method that ends a batch, the next rank 0
        does not call it.

        Args:
            place: Epoch, batch; what distinguishes two calls.
            args: What Keras gives to it: epoch or batch number, logs.

        Raises:
            Exception: What a callback raised, on every rank.
        """
        if method not in self.used:
            return
        ran: list[_Ran] = []  # on rank 0: it is not called again
        began = self.backend.rank == 0
        variables = self._tf_variables() if self.backend.elastic else ()

        def attempt() -> _Outcome:
            if self.backend.rank == 0 and not ran:
                calls = self._last.get(method) != place
                calls &= began or not method.endswith("batch_end")
                self._last[method] = place
                ran.append(self._run_and_look(method, args) if calls else _Ran())
            return self._agreed(method, ran[0] if ran else _Ran())

        outcome = self._unit(attempt, variables)
        if outcome is not None:
            self._follow(outcome, ran[0].error if ran else None)

    def _tf_variables(self) -> list[tf.Variable]:
        """Return what methods may change of the model on rank 0, for other ranks."""
        if self.is_shared_later:
            return []
        found = map(keras_compat.model.tf_variable, self._variables)
        return [*outside_variables(self.model), *found]

    def _agreed(self, method: str, ran: _Ran) -> _Outcome:
        """Give every rank what a method has changed on rank 0."""
        backend, model = self.backend, self.model
        stops = [float(getattr(model, name, False)) for name in _STOPS]
        if backend.size == 1:
            error = None if ran.error is None else failure.sent(ran.error, method)
            return _Outcome(stops, error=error)
        trainable = keras_compat.model.trainable_flags(model)
        changed = trainable != self._trainable
        found = changed, ran.has_drawn, ran.has_assigned, ran.error is not None
        flags = np.array([*stops, *map(float, found)])
        *agreed, changed, drawn, assigned, failed = self._parts.agree(flags)
        outcome = _Outcome(agreed)
        if failed:
            mine = failure.sent(ran.error, f"a callback's {method}")
            outcome.error = broadcast_object(backend, mine)
            return outcome
        if changed:
            outcome.trainable = list(backend.broadcast_array(np.array(trainable)))
            # The order of the variables depends on the flags.
            keras_compat.model.set_trainable_flags(model, outcome.trainable)
        if drawn:
            outcome.random = broadcast_object(backend, host_random.state())
        undone: Any = contextlib.nullcontext()
        if backend.elastic:
            undone = whole_or_absent(self._tf_variables())
        with undone:
            self._give(method, bool(assigned))
        return outcome

    def _follow(self, outcome: _Outcome, error: Exception | None) -> None:
        """Do what a method has done on rank 0.

        Args:
            error: What it has raised, on rank 0.
        """
        if outcome.error is not None:
            if self.backend.size == 1 and error is not None:
                raise error
            raise failure.shared(outcome.error, error, self.backend)
        for name, value in zip(_STOPS, outcome.stops, strict=True):
            if float(getattr(self.model, name, False)) != value:
                setattr(self.model, name, bool(value))
        if outcome.trainable is not None:
            self._trainable = outcome.trainable
            keras_compat.model.set_trainable_flags(self.model, self._trainable)
        if outcome.random is not None:
            host_random.set_state(outcome.random)

    def _run_and_look(self, method: str, args: tuple[Any, ...]) -> _Ran:
        """Act like ``_run``, and find what other ranks then lack: random numbers, weights.

        Between batches, numbers are not looked at: threads that read data draw, too.
        At all other times every rank gets the weights anyway.
        """
        if self.backend.size == 1:
            return _Ran(error=self._run(method, args))
        if "batch" in method or method.startswith("on_predict"):
            with keras_compat.model.assignments() as seen:
                error = self._run(method, args)
            optimizer = _optimizer(self.model)
            rates = _learning_rate(optimizer) if optimizer is not None else []
            watched = set(map(id, self._variables)) - set(map(id, rates))
            return _Ran(has_assigned=bool(seen & watched), error=error)
        before = host_random.state()
        error = self._run(method, args)
        return _Ran(has_drawn=host_random.drawn_since(before), error=error)

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
            self._parts.whole(),
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

    def _give(self, method: str, assigned: bool) -> None:
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

    def share_state(self) -> None:
        """Give every rank what rank 0's callbacks have gathered; every rank calls it."""
        if self._has_others and self.used:
            self._state.share(self.backend, self.model, self.params, self._unit)

    def share_memory(self) -> None:
        """Act like ``share_state``, for a rank that becomes rank 0 in the middle of a training.

        It then continues after the last method. Every rank calls it.
        """
        if not (self._has_others and self.used):
            return
        last = self._unit(lambda: broadcast_object(self.backend, self._last))
        if self._state.share(self.backend, self.model, self.params, self._unit):
            last.pop("on_train_begin", None)  # see CallbackState.begin_training
            self._last = last if self.backend.rank else self._last

    def agreed_logs(self, method: str, logs: dict[str, Any]) -> dict[str, Any]:
        """Return rank 0's logs, on every rank: a callback may have added to them."""
        if method not in self.used or not self._has_others:
            return logs
        found = self._unit(lambda: broadcast_object(self.backend, logs))
        return logs if found is None else found


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
