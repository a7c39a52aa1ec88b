"""Keras' optimizers: applies sums, builds them for shards, places them on devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

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


def build_optimizer(
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
    on_variable_devices: bool = False,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Build an optimizer that is not built.

    Args:
        on_variable_devices: Whether each slot is on its variable's device.

    Returns:
        Its slots (variables shaped like one of the model's), each with the variable of
        the model.
    """
    core = core_optimizer(optimizer)
    slots: list[tuple[keras.Variable, keras.Variable]] = []
    add = core.add_variable_from_reference

    def record(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
        device = contextlib.nullcontext()
        if on_variable_devices:
            device = tf.device(reference_variable.value.device)
        with device:
            slot = add(reference_variable, *args, **kwargs)
        slots.append((slot, reference_variable))
        return slot

    with replacing(core, "add_variable_from_reference", record):
        optimizer.build(variables)
    return slots


@contextlib.contextmanager
def update_on_variable_devices(optimizer: keras.Optimizer) -> Iterator[None]:
    """Have the optimizer update each variable on the variable's device."""
    core = core_optimizer(optimizer)
    update = core.update_step

    def update_step(
        gradient: Gradient, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        with tf.device(variable.device):
            return update(gradient, variable, learning_rate)

    with replacing(core, "update_step", update_step):
        yield


@contextlib.contextmanager
def clip_shards(
    optimizer: keras.Optimizer,
    summed: Callable[[list[tf.Tensor], Sequence[keras.Variable]], list[tf.Tensor]],
) -> Iterator[None]:
    """Clip gradients by norms of which this process has a part.

    Args:
        summed: Called with the sums of squares of the gradients' parts in this process,
            and their variables; returns the sums of squares of whole gradients.
    """
    core = core_optimizer(optimizer)
    applies, clips = core._backend_apply_gradients, core._clip_gradients
    variables: list[keras.Variable] = []

    def apply(grads: Any, trainable_variables: Any) -> None:
        variables[:] = trainable_variables
        applies(grads, trainable_variables)
        variables.clear()

    def clip(grads: Sequence[Gradient]) -> list[Gradient]:
        limit = core.clipnorm or core.global_clipnorm
        if not limit:
            return clips(grads)
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        squares = [tf.reduce_sum(tf.square(v)) for v in values]
        norms = [tf.sqrt(s) for s in summed(squares, variables)]
        if core.clipnorm:
            divisors = [tf.maximum(norm, limit) / limit for norm in norms]
            return [_over(g, d) for g, d in zip(grads, divisors, strict=True)]
        norm = tf.norm(tf.stack([tf.cast(n, norms[0].dtype) for n in norms]))
        # An infinite gradient makes all of them NaN, as in Keras, which adds look-ups up.
        divisor = tf.maximum(norm, limit) / limit + (norm - norm)
        return [_over(tf.convert_to_tensor(g), divisor) for g in grads]

    with (
        replacing(core, "_backend_apply_gradients", apply),
        replacing(core, "_clip_gradients", clip),
    ):
        yield


def _over(gradient: Gradient, divisor: tf.Tensor) -> Gradient:
    """Return a gradient divided by a scalar; of look-ups, the values are divided."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    values = gradient.values if is_sparse else gradient
    values /= tf.cast(divisor, values.dtype)
    if not is_sparse:
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


@contextlib.contextmanager
def find_overflow(
    optimizer: keras.Optimizer, everywhere: Callable[[tf.Tensor], tf.Tensor]
) -> Iterator[None]:
    """Have a LossScaleOptimizer skip an update if another process' gradients overflow.

    Args:
        everywhere: Called with whether this process' gradients are finite; returns whether
            the gradients of all processes are.
    """
    if not expects_overflow(optimizer):
        yield
        return
    here = optimizer.check_finite
    with replacing(optimizer, "check_finite", lambda grads: everywhere(here(grads))):
        yield


@contextlib.contextmanager
def replace_shapes(
    shapes: Sequence[tuple[keras.Variable, tuple[int, ...]]],
) -> Iterator[None]:
    """Have variables accept values of these shapes in a StatelessScope."""
    with contextlib.ExitStack() as stack:
        for variable, shape in shapes:
            stack.enter_context(replacing(variable, "_shape", shape))
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


def has_plain_rate(optimizer: keras.Optimizer) -> bool:
    """Return whether the learning rate is a variable, which a callback may set."""
    rate = getattr(core_optimizer(optimizer), "_learning_rate", None)
    return isinstance(rate, keras.Variable)
