"""What is taken from a model's own step while it is traced, or runs eagerly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.replacements import replacing
from collective.training.keras_compat.optimizers import (
    applied_to,
    optimizers_with_apply,
)


@contextlib.contextmanager
def loss_of_step(model: keras.Model) -> Iterator[list[tf.Tensor]]:
    """Inside, collects the losses that the model's step tracks: those of its batch alone.

    What a step returns as ``loss`` is the mean since the metrics were last reset.
    """
    found: list[tf.Tensor] = []
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        yield found
        return
    update = tracker.update_state

    def noting(values: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(tf.convert_to_tensor(values))
        return update(values, *args, **kwargs)

    with replacing(tracker, "update_state", noting):
        yield found


@contextlib.contextmanager
def changed_gradients(
    change: Callable[[Sequence[Any], Sequence[keras.Variable]], Sequence[Any]],
) -> Iterator[None]:
    """Inside, optimizers apply what a function makes of the gradients that they are given.

    Args:
        change: Called with the gradients, of which some may be None, and variables.
    """
    inside = False

    def changing(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            nonlocal inside
            if inside:  # an optimizer that another one calls
                return original(self, grads, trainable_variables)
            inside = True
            try:
                changed = change(grads, applied_to(self, trainable_variables))
                return original(self, changed, trainable_variables)
            finally:
                inside = False

        return apply

    with contextlib.ExitStack() as stack:
        for kind in optimizers_with_apply():
            stack.enter_context(replacing(kind, "apply", changing(kind.apply)))
        yield
