"""Values and calls of a model's own step, caught while it is traced or runs eagerly."""

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
    """Collect the losses of single batches, which the model's step hands to its tracker.

    The ``loss`` that a step returns is the mean since the metrics were last reset.
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
def applied_by(
    update: Callable[[keras.Optimizer, Sequence[Any], list[Any]], Any],
) -> Iterator[None]:
    """Have a function called in place of ``optimizer.apply`` of any optimizer.

    Args:
        update: Called with optimizer, gradients, of which some may be None, and
            variables. Inside it, ``optimizer.apply`` is the optimizer's own method.
    """
    inside = False

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            nonlocal inside
            if inside:
                return original(self, grads, trainable_variables)
            inside = True
            try:
                return update(self, grads, applied_to(self, trainable_variables))
            finally:
                inside = False

        return apply

    with contextlib.ExitStack() as stack:
        for kind in optimizers_with_apply():
            stack.enter_context(replacing(kind, "apply", replaced(kind.apply)))
        yield


@contextlib.contextmanager
def only_builds(builds: bool = True) -> Iterator[None]:
    """Have optimizers apply nothing; at the end, build those that would have, if wanted."""
    noted: list[tuple[keras.Optimizer, list[keras.Variable]]] = []
    with applied_by(
        lambda optimizer, _, variables: noted.append((optimizer, variables))
    ):
        yield
    for optimizer, variables in noted:
        if builds and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)


class _OfMetrics(keras.StatelessScope):
    """Keeps values that are written to metrics; all other variables are really written."""

    def __init__(self, metrics: Sequence[keras.Variable]):
        super().__init__([(v, tf.zeros(v.shape, v.dtype)) for v in metrics])
        self._metrics = {id(v) for v in metrics}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keep a value for a metric, and write any other; ``assign`` calls this."""
        variable, value = update
        if id(variable) in self._metrics:
            super().add_update(update)
        else:
            variable._direct_assign(value)


def counted_metrics(model: keras.Model) -> keras.StatelessScope:
    """Return a scope in which a model's metrics count from zero and keep their values."""
    return _OfMetrics(model.metrics_variables)
