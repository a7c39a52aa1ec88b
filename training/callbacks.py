"""Ordinary Keras callbacks in a job of many ranks.

They run on rank 0 alone, so files are written once and decisions taken once. What a
callback can change (stop_training, the learning rate, weights) is broadcast after each
hook that some callback overrides. A collective inside a callback would wait for ranks
that do not call it; it raises instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from collective import recorder
from collective.training import frozen_layers, outside_variables
from collective.training.observer import FinishedStep, Observer
from collective.training.position import Position
from collective.training.prepared import get_partition
from collective.training.variables import broadcast_model

HOOKS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
)
# Keras' older name for a hook, which the hook calls unless it is overridden itself.
_ALIASES = {
    "on_train_batch_begin": "on_batch_begin",
    "on_train_batch_end": "on_batch_end",
}


class RankZeroCallbacks(Observer):
    """Runs hooks on rank 0, and makes every rank follow what they decided.

    Args:
        callbacks: The user's. Rank 0's count; other ranks may have none.
        position: Of the training.
        epochs, steps: Given to the callbacks as ``params``, as Keras does.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        position: Position,
        epochs: int,
        steps: int,
    ):
        self.position = position
        self.model = position.model
        self.backend = position.backend
        self.callbacks = list(callbacks)
        self.hooks: set[str] = set()  # that a callback of rank 0 overrides
        self._params = {"epochs": epochs, "steps": steps, "verbose": 1}
        self._ready = False
        self._epoch = self._first = 0
        self._last: dict[str, tuple[int, ...]] = {}  # epoch and batch of the last call
        self.model.stop_training = False

    def begin(self) -> None:
        """Finds out which hooks matter, and calls ``on_train_begin``.

        Rank 0 decides: a script may make callbacks there only.
        """
        if self.backend.rank == 0 and not self._ready:
            self._ready = True
            for callback in self.callbacks:
                callback.set_params(self._params)
                callback.set_model(self.model)
        mine = [any(_overrides(c, hook) for c in self.callbacks) for hook in HOOKS]
        agreed = self.backend.broadcast_array(np.array(mine, np.float32))
        self.hooks = {hook for hook, used in zip(HOOKS, agreed, strict=True) if used}
        if any("batch" in hook for hook in self.hooks):
            self.hooks.add("on_epoch_end")  # broadcasts what hooks of batches changed
        self._call("on_train_begin", {})

    def reconfigured(self, root: int) -> None:
        """As ``begin``: another rank may have become rank 0."""
        self.begin()

    def begin_epoch(self, epoch: int, first: int, last: int) -> None:
        """Calls ``on_epoch_begin``."""
        self._epoch, self._first = epoch, first
        self._call("on_epoch_begin", epoch, {})

    def before_input(self, number: int) -> None:
        """Calls ``on_train_batch_begin``."""
        if "on_train_batch_begin" in self.hooks:
            self._call("on_train_batch_begin", number - self._first, {})

    def after_step(self, step: FinishedStep) -> None:
        """Calls ``on_train_batch_end``."""
        if "on_train_batch_end" in self.hooks:
            averages = self.position.averages
            logs = averages.logs() if averages and self.backend.rank == 0 else {}
            self._call("on_train_batch_end", step.number - self._first, logs)

    def before_validation(self) -> None:
        """Calls ``on_test_begin``."""
        self._call("on_test_begin", {})

    def after_validation(self, logs: dict[str, float]) -> None:
        """Calls ``on_test_end``."""
        self._call("on_test_end", logs)

    def end_epoch(self, epoch: int, logs: dict[str, float]) -> None:
        """Calls ``on_epoch_end``."""
        self._call("on_epoch_end", epoch, dict(logs))

    def end(self) -> None:
        """Calls ``on_train_end``."""
        self._call("on_train_end", {})

    def _call(self, hook: str, *args: Any) -> None:
        """Runs a hook on rank 0; afterwards all ranks have the same model again.

        After hooks of a batch only ``stop_training``, the learning rate and variables
        that are not the model's are broadcast; after all others, the end of the epoch among them, every variable of
        model and optimizer is. No hook is called twice for the same epoch or batch,
        though an elastic job repeats what a dead rank has interrupted.

        Args:
            hook: Name of the Keras hook, ``on_epoch_end``.
            args: What Keras gives to it: epoch or batch number, logs.
        """
        if hook not in self.hooks:
            return
        numbers = [n for n in args if isinstance(n, int)]
        once = hook in ("on_train_begin", "on_train_end")
        place = () if once else (self._epoch, *numbers)
        if self.backend.rank == 0 and self._last.get(hook) != place:
            self._last[hook] = place
            what = f"a callback's {hook}"
            parts = None if "batch" in hook else get_partition(self.model)
            with (
                self.backend.only_rank_zero(what),
                recorder.span(recorder.OTHER, what),
                parts.unchanged(what) if parts else contextlib.nullcontext(),
            ):
                for callback in self.callbacks:
                    getattr(callback, hook)(*args)
            if "batch" not in hook:
                frozen_layers.check(self.model, hook)
        if self.backend.size == 1:
            return
        stop = np.array([float(self.model.stop_training)])
        self.model.stop_training = bool(self.backend.broadcast_array(stop)[0])
        if "batch" in hook:
            self.backend.broadcast(_learning_rate(self.model.optimizer))
            self.backend.broadcast(outside_variables.found(self.model))
        else:
            broadcast_model(self.model, self.backend)


def _learning_rate(optimizer: keras.Optimizer) -> list[keras.Variable]:
    return [v for v in optimizer.variables if v.name == "learning_rate"]


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    for name in {hook, _ALIASES.get(hook, hook)}:
        base = getattr(keras.callbacks.Callback, name)
        if getattr(getattr(callback, name), "__func__", None) is not base:
            return True
    return False
