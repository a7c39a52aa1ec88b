"""Keras' optimizers: fed sums, in parts, and counted rightly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf


def core_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """The optimizer that updates variables, inside a LossScaleOptimizer or not."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def switch_off_gradient_sum(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer take its gradients as they are.

    Under a strategy Keras sums gradients itself, *after* it has clipped them; ours
    are summed before, so that its clipping acts on the true gradient.
    """
    core = core_optimizer(optimizer)
    if not hasattr(core, "_all_reduce_sum_gradients"):
        raise RuntimeError(
            f"keras {keras.__version__} has no _all_reduce_sum_gradients to switch "
            "off; gradients would be summed twice"
        )
    core._all_reduce_sum_gradients = lambda pairs: list(pairs)


def parts(variables: Iterable[Any]) -> list[Any]:
    """The variables, those that a strategy has partitioned as their parts.

    Keras' optimizers know no partitioned variable; each part is one to them.
    """
    found: list[Any] = []
    for variable in variables:
        value = getattr(variable, "value", None)
        found += getattr(value, "variables", [variable])
    return found


class _Interval(int):
    """One that Keras takes for none."""

    def __bool__(self) -> bool:
        return False


def apply(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    assign: Callable[[Sequence[Any], Sequence[tf.Tensor]], None],
) -> None:
    """``optimizer.apply``, also where variables are partitioned.

    With ``ema_overwrite_frequency``, Keras writes averages of the weights over them in
    a branch, which no strategy allows; here they are always written, if only as they
    are.

    Args:
        optimizer: Built.
        gradients, variables: As for ``optimizer.apply``.
        assign: Gives TensorFlow's variables values, on each replica the same.
    """
    core = core_optimizer(optimizer)
    if core.ema_overwrite_frequency is not None:
        core.ema_overwrite_frequency = _Interval(core.ema_overwrite_frequency)
    _apply(optimizer, gradients, variables)
    every = core.ema_overwrite_frequency
    if not core.use_ema or every is None:
        return
    steps = tf.convert_to_tensor(core.iterations)  # 0 where none has been applied yet
    due = tf.logical_and(steps > 0, steps % int(every) == 0)
    written, values = [], []
    for variable, average in zip(
        core._trainable_variables, core._model_variables_moving_average, strict=True
    ):
        if average is not None:
            value = tf.convert_to_tensor(average)
            if variable.constraint is not None:
                value = variable.constraint(value)
            ours = isinstance(variable, keras.Variable)
            written.append(variable.value if ours else variable)
            values.append(tf.where(due, value, tf.convert_to_tensor(variable)))
    assign(written, values)


def _apply(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    whole = [len(parts([v])) == 1 for v in variables]
    if all(whole):
        optimizer.apply(gradients, variables)
        return
    # By the norm of all of a gradient; the parts have none larger, and stay.
    gradients = core_optimizer(optimizer)._clip_gradients(list(gradients))
    cut: list[tf.Tensor] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        rows = [part.shape[0] for part in parts([variable])] if variable.shape else []
        cut += tf.split(gradient, rows) if len(rows) > 1 else [gradient]
    optimizer.apply(cut, parts(variables))
    for variable, is_whole in zip(variables, whole, strict=True):
        if not is_whole and variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def count_atomically(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer's counter right where several workers count at a time.

    Keras reads it, adds one and writes it, so that counts get lost in between.
    """
    iterations = core_optimizer(optimizer).iterations
    iterations.assign_add = iterations.value.assign_add


def build_in_parts(
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
    lengths: Sequence[int],
) -> tuple[list[keras.Variable], list[tuple[keras.Variable, int]]]:
    """Builds an optimizer for vectors that stand for parts of variables.

    Args:
        optimizer: Not built.
        variables: What it would be built for.
        lengths: Of their parts.

    Returns:
        The parts, zero; and the optimizer's variables that are shaped as a part, each
        with the number of that part.
    """
    core = core_optimizer(optimizer)
    excluded: set[int] = getattr(core, "_exclude_from_weight_decay", set())
    parts = []
    for variable, length in zip(variables, lengths, strict=True):
        part = keras.Variable(
            "zeros", shape=(length,), dtype=variable.dtype, name=variable.name
        )
        part._path = variable.path  # names slots, and excludes from weight decay
        if core._var_key(variable) in excluded:
            excluded.add(core._var_key(part))
        parts.append(part)
    numbers = {id(part): i for i, part in enumerate(parts)}
    made = build_optimizer(optimizer, parts)
    return parts, [(slot, numbers[id(part)]) for slot, part in made]


def build_optimizer(
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
    beside: bool = False,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Builds an optimizer that is not built.

    Args:
        optimizer: The optimizer.
        variables: Of the model.
        beside: Whether to put what is kept for a variable on the variable's device.

    Returns:
        Its variables that are shaped as one of the model's, each with that one.
    """
    core = core_optimizer(optimizer)
    slots: list[tuple[keras.Variable, keras.Variable]] = []
    make = core.add_variable_from_reference

    def noted(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
        device = tf.device(reference_variable.value.device) if beside else None
        with device or contextlib.nullcontext():
            made = make(reference_variable, *args, **kwargs)
        slots.append((made, reference_variable))
        return made

    with mock.patch.object(core, "add_variable_from_reference", noted):
        optimizer.build(variables)
    return slots


def replace_clipping(
    optimizer: keras.Optimizer,
    clip: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """Makes the optimizer clip un-scaled gradients by a function; returns its own."""
    core = core_optimizer(optimizer)
    own, core._clip_gradients = core._clip_gradients, clip
    return own


@contextlib.contextmanager
def shaped(shapes: Sequence[tuple[keras.Variable, tuple[int, ...]]]) -> Iterator[None]:
    """Inside, variables take values of these shapes in a StatelessScope."""
    with contextlib.ExitStack() as stack:
        for variable, shape in shapes:
            stack.enter_context(mock.patch.object(variable, "_shape", shape))
        yield


def loss_scale(optimizer: keras.Optimizer) -> tf.Tensor:
    """What the optimizer multiplies the loss with; ``apply`` divides it out."""
    return tf.cast(optimizer.scale_loss(tf.ones([], tf.float32)), tf.float32)


def expects_overflow(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer itself skips updates that are not finite."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def finish(model: keras.Model) -> None:
    """What Keras does at the end of ``fit``: an average of weights replaces them."""
    core = core_optimizer(model.optimizer)
    core.finalize_variable_values(parts(model.trainable_variables))


def update_beside(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer update each variable on the variable's device."""
    core = core_optimizer(optimizer)
    update = core.update_step

    def beside(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(variable.device):
            return update(gradient, variable, learning_rate)

    core.update_step = beside
