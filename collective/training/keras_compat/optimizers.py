"""Keras' optimizers: which there are, and how they apply sums."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from collective.replacements import replacing

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


def core_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return the optimizer that updates variables, without a LossScaleOptimizer around it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizers_with_apply() -> tuple[type[keras.Optimizer], ...]:
    """Return the classes whose ``apply`` every update of Keras' optimizers calls."""
    return BaseOptimizer, keras.optimizers.LossScaleOptimizer


def single_optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return the optimizers that update variables: several in a built MultiOptimizer."""
    core = core_optimizer(optimizer)
    if _is_multi(core):
        return [inner for each in core.optimizers for inner in single_optimizers(each)]
    return [core]


def _is_multi(optimizer: keras.Optimizer) -> bool:
    kind = getattr(keras.optimizers, "MultiOptimizer", None)  # of newer Keras only
    return kind is not None and isinstance(optimizer, kind)


def learning_rates(optimizer: keras.Optimizer) -> list[tf.Tensor]:
    """Return the present rates, also if a schedule or a user's function gives them."""
    return [
        tf.convert_to_tensor(single.learning_rate)
        for single in single_optimizers(optimizer)
    ]


def apply(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
) -> object:
    """Call ``optimizer.apply`` with gradients that are sums already.

    Under a strategy Keras sums gradients itself, after clipping.
    """
    with contextlib.ExitStack() as inside:
        for single in single_optimizers(optimizer):
            inside.enter_context(
                replacing(
                    single, "_all_reduce_sum_gradients", lambda pairs: list(pairs)
                )
            )
        return optimizer.apply(gradients, variables)


@contextlib.contextmanager
def count_atomically(optimizer: keras.Optimizer) -> Iterator[None]:
    """Trace the step counter for workers that update it concurrently.

    Keras reads it, adds one and writes it, which loses counts.
    """
    with contextlib.ExitStack() as stack:
        for each in {core_optimizer(optimizer), *single_optimizers(optimizer)}:
            counter = each.iterations
            stack.enter_context(
                replacing(counter, "assign_add", counter.value.assign_add)
            )
        yield


def expects_overflow(optimizer: keras.Optimizer) -> bool:
    """Return whether the optimizer itself skips updates that are not finite."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def finish(optimizer: keras.Optimizer, variables: Iterable[keras.Variable]) -> None:
    """Do what Keras does at the end of ``fit``: replace weights by their averages."""
    core_optimizer(optimizer).finalize_variable_values(list(variables))


def applied_to(
    optimizer: keras.Optimizer, variables: Iterable[keras.Variable] | None
) -> list[keras.Variable]:
    """Return the variables passed to ``apply``, or those the optimizer was built for."""
    if variables is None:
        variables = core_optimizer(optimizer)._trainable_variables
    return list(variables)


def plain_rate(optimizer: keras.Optimizer) -> keras.Variable | None:
    """Return the learning rate if it is a variable, which a callback may set; else None.

    An optimizer of several others has no rate, though it has such a variable.
    """
    core = core_optimizer(optimizer)
    rate = None if _is_multi(core) else getattr(core, "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None
