"""Callbacks run on every rank; if they decide, every rank follows rank 0.

A callback sees the same logs on every rank, so it mostly decides the same. A clock, a file
or another random number may part the ranks. So after each method that a callback of the
user's overrides, rank 0 sends its decisions: whether the call stops, the learning rate,
with which epoch the training begins; and its weights if a callback has assigned some.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.process.object_collectives import gather_few
from collective.training.sharding.held import is_held
from collective.training.unedited.tracking import records
from collective.training.verification.same_calls import share_weights

_STOPS = ("stop_training", "stop_evaluating", "stop_predicting")
METHODS = tuple(
    f"on_{what}_{when}"
    for what in (
        *("train", "epoch", "train_batch", "test", "test_batch"),
        *("predict", "predict_batch"),
    )
    for when in ("begin", "end")
)
# Older names, which these methods call unless they are overridden themselves.
_ALIASES = {
    "on_train_batch_begin": "on_batch_begin",
    "on_train_batch_end": "on_batch_end",
}
# Callbacks of Keras decide by the logs alone, but for those that read files or call
# functions of the user's.
_MAY_DIFFER = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.LambdaCallback,
    keras.callbacks.LearningRateScheduler,
)


@contextlib.contextmanager
def agreeing(
    callbacks: Sequence[keras.callbacks.Callback],
    backend: Backend,
    unit: Callable[[Callable[[], Any]], Any],
) -> Iterator[list[keras.callbacks.Callback]]:
    """Yield the callbacks of a call with one more, by which the ranks agree.

    Every rank calls this. Where one has other callbacks, all that decide count as such
    that decide otherwise.

    Args:
        callbacks: Those of the user, each by itself.
        unit: Runs what all ranks do together, again where one of them has died.
    """
    mine = [c for c in callbacks if not records(c)]
    kinds = zlib.crc32("\n".join(str(type(c)) for c in mine).encode())
    masks = _mask([c for c in mine if _may_decide_otherwise(c)]), _mask(mine)
    gathered = unit(lambda: gather_few(backend, [kinds, *masks]))
    is_same = (gathered[:, 0] == gathered[0, 0]).all()
    used_by = gathered[:, 1 if is_same else 2].astype(np.int64)
    mask = int(np.bitwise_or.reduce(used_by))
    used = [name for place, name in enumerate(METHODS) if mask >> place & 1]
    if not used:
        yield list(callbacks)
        return
    with keras_compat.model.assignments() as assigned:
        yield [*callbacks, _callback(used, backend, unit, assigned)]


def _mask(callbacks: Sequence[keras.callbacks.Callback]) -> int:
    """Return a number with a bit for each of ``METHODS`` that a callback has."""
    return sum(
        any(overrides(callback, name) for callback in callbacks) << place
        for place, name in enumerate(METHODS)
    )


def _callback(
    used: Sequence[str],
    backend: Backend,
    unit: Callable[[Callable[[], Any]], Any],
    assigned: set[int],
) -> keras.callbacks.Callback:
    """Return a callback that has these methods alone: Keras calls no others."""

    def agree(self: keras.callbacks.Callback, *args: Any, **more: Any) -> None:
        _agree(self.model, backend, unit, assigned)
        assigned.clear()

    kind = type("Agreement", (keras.callbacks.Callback,), dict.fromkeys(used, agree))
    return kind()


def _agree(
    model: keras.Model,
    backend: Backend,
    unit: Callable[[Callable[[], Any]], Any],
    assigned: set[int],
) -> None:
    optimizer = getattr(model, "optimizer", None)
    mine = _decisions(model, optimizer)
    sent = np.array([*mine, float(bool(assigned))])
    first = unit(lambda: backend.broadcast_array(sent))
    for name, is_set, value in zip(_STOPS, mine, first, strict=False):
        if is_set != value:
            setattr(model, name, bool(value))
    epoch, rate, any_assigned = first[len(_STOPS) :]
    if mine[len(_STOPS)] != epoch:
        keras_compat.model.set_initial_epoch(model, int(epoch))
    if not np.isnan(rate) and mine[len(_STOPS) + 1] != rate:
        optimizer.learning_rate = rate  # type: ignore[union-attr]
    if any_assigned:
        share_weights(_variables(model, optimizer), backend, unit)


def _decisions(model: keras.Model, optimizer: Any) -> list[float]:
    stops = [float(bool(getattr(model, name, False))) for name in _STOPS]
    epoch = keras_compat.model.initial_epoch(model) or 0
    rate = None if optimizer is None else keras_compat.optimizers.plain_rate(optimizer)
    return [*stops, float(epoch), np.nan if rate is None else float(np.asarray(rate))]


def _variables(model: keras.Model, optimizer: Any) -> list[Any]:
    found = [*model.variables, *(() if optimizer is None else optimizer.variables)]
    return [keras_compat.model.tf_variable(v) for v in found if not is_held(v)]


def _may_decide_otherwise(callback: keras.callbacks.Callback) -> bool:
    of_keras = type(callback).__module__.split(".")[0] == "keras"
    return not of_keras or isinstance(callback, _MAY_DIFFER)


def overrides(callback: keras.callbacks.Callback, method: str) -> bool:
    """Return whether a callback has a method of its own."""
    for name in {method, _ALIASES.get(method, method)}:
        base: Callable[..., Any] = getattr(keras.callbacks.Callback, name)
        if getattr(getattr(callback, name), "__func__", None) is not base:
            return True
    return False
