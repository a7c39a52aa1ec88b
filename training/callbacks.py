"""Ordinary Keras callbacks in a job of many ranks.

They run on rank 0 alone, so files are written once and decisions taken once. What a
callback can change (stop_training, the learning rate, weights) is sent to the other
ranks behind each hook that some callback overrides. A collective called from inside a
callback would wait for ranks that are elsewhere; it raises instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from collective import recorder
from collective.backends.base import Backend
from collective.training.prepared import get_partition

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


class RankZeroCallbacks:
    """Runs hooks on rank 0 and makes every rank follow what they decided.

    Args:
        callbacks: The user's. Rank 0's count; other ranks may have none.
        model: The compiled model.
        backend: What the ranks talk through.
        epochs, steps: Told to the callbacks, as Keras does.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        backend: Backend,
        epochs: int,
        steps: int,
    ):
        self.model = model
        self.backend = backend
        self.callbacks = list(callbacks)
        self.hooks: set[str] = set()
        self._params = {"epochs": epochs, "steps": steps, "verbose": 1}
        self._ready = False
        self._epoch = 0
        self._last: dict[str, tuple[int, ...]] = {}  # where each hook was called last
        model.stop_training = False

    def agree(self) -> None:
        """Finds out which hooks matter. Every rank calls it, first of all.

        Rank 0 tells: a script may make callbacks there only. They are called again
        when another rank has become rank 0.
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
            self.hooks.add("on_epoch_end")  # what they changed is followed there

    def call(self, hook: str, *args: Any) -> None:
        """Runs a hook on rank 0; afterwards all ranks agree again.

        After hooks of a batch only ``stop_training`` and the learning rate travel;
        after all others, the end of the epoch among them, every variable of model and
        optimizer does. A callback does not see that something is done again because a
        rank has died: no hook is called twice for the same epoch or batch.

        Args:
            hook: Name of the Keras hook, ``on_epoch_end``.
            args: What Keras hands to it: epoch or batch number, logs.
        """
        if hook == "on_epoch_begin":
            self._epoch = args[0]
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
        if self.backend.size == 1:
            return
        stop = np.array([float(self.model.stop_training)])
        self.model.stop_training = bool(self.backend.broadcast_array(stop)[0])
        if "batch" in hook:
            self.backend.broadcast(_learning_rate(self.model.optimizer))
        else:
            make_alike(self.model, self.backend)


def followed_variables(model: keras.Model) -> list[keras.Variable]:
    """What makes two ranks the same: weights, layer state, optimizer state.

    Not the variables of which each rank has a part.
    """
    parts = get_partition(model)
    return [
        v for v in all_variables(model) if parts is None or parts.shape_of(v) is None
    ]


def make_alike(model: keras.Model, backend: Backend) -> None:
    """Gives every rank rank 0's model; every rank calls it."""
    backend.broadcast(followed_variables(model))
    parts = get_partition(model)
    if parts is not None:
        parts.broadcast_shards()


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Weights, layer state and optimizer state."""
    return [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *model.optimizer.variables,
    ]


def _learning_rate(optimizer: keras.Optimizer) -> list[keras.Variable]:
    return [v for v in optimizer.variables if v.name == "learning_rate"]


def _overrides(callback: keras.callbacks.Callback, hook: str) -> bool:
    for name in {hook, _ALIASES.get(hook, hook)}:
        base = getattr(keras.callbacks.Callback, name)
        if getattr(getattr(callback, name), "__func__", None) is not base:
            return True
    return False
