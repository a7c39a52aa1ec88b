"""Keras' optimizers: given sums, built for shards, placed on devices.

``switch_off_gradient_sum``, ``replace_clipping``, ``update_on_variable_devices`` and
``count_atomically`` change the optimizer object for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from collective.replacements import replacing
from collective.tensorflow_ops.rows import added_in_order, dense, parts_ranks


def core_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """The optimizer that updates variables, inside a LossScaleOptimizer or not."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizers_with_apply() -> tuple[type[keras.Optimizer], ...]:
    """The classes whose ``apply`` every update of Keras' optimizers goes through."""
    return BaseOptimizer, keras.optimizers.LossScaleOptimizer


def single_optimizers(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """The optimizers that update variables: several in a MultiOptimizer, once built."""
    core = core_optimizer(optimizer)
    if _is_multi(core):
        return [inner for each in core.optimizers for inner in single_optimizers(each)]
    return [core]


def _is_multi(optimizer: keras.Optimizer) -> bool:
    kind = getattr(keras.optimizers, "MultiOptimizer", None)  # of newer Keras only
    return kind is not None and isinstance(optimizer, kind)


def switch_off_gradient_sum(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer use its gradients as they are.

    Under a strategy Keras sums gradients itself, *after* clipping; ours are summed
    before, so that clipping acts on the true gradient.
    """
    for single in single_optimizers(optimizer):
        if not hasattr(single, "_all_reduce_sum_gradients"):
            raise RuntimeError(
                f"keras {keras.__version__} has no _all_reduce_sum_gradients to switch "
                "off; gradients would be summed twice"
            )
        single._all_reduce_sum_gradients = lambda pairs: list(pairs)


def switch_on_gradient_sum(optimizer: keras.Optimizer) -> None:
    """Undoes ``switch_off_gradient_sum``: a plain ``model.fit`` sums gradients again."""
    for single in single_optimizers(optimizer):
        vars(single).pop("_all_reduce_sum_gradients", None)


def learning_rates(optimizer: keras.Optimizer) -> list[tf.Tensor]:
    """The rates now: of schedules and of a user's functions, too."""
    return [
        tf.convert_to_tensor(single.learning_rate)
        for single in single_optimizers(optimizer)
    ]


def flatten_partitioned(variables: Iterable[Any]) -> list[Any]:
    """The variables; each that a TensorFlow strategy has partitioned as its pieces.

    Keras' optimizers know no partitioned variables: each piece is a variable to them.
    """
    found: list[Any] = []
    for variable in variables:
        value = getattr(variable, "value", None)
        found += getattr(value, "variables", [variable])
    return found


class _Interval(int):
    """An interval that Keras takes for no interval."""

    def __bool__(self) -> bool:
        return False


def apply(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    assign: Callable[[Sequence[Any], Sequence[tf.Tensor]], None],
    trainable: Sequence[keras.Variable] = (),
) -> None:
    """``optimizer.apply``, also where variables are partitioned.

    With ``ema_overwrite_frequency``, Keras overwrites weights by their averages in a
    branch, which no strategy allows. Here they are always written: between two
    intervals, with the values they have.

    Args:
        trainable: All variables that the optimizer was built for.
    """
    singles = single_optimizers(optimizer)
    for single in singles:
        if single.ema_overwrite_frequency is not None:
            single.ema_overwrite_frequency = _Interval(single.ema_overwrite_frequency)
    if _is_multi(core_optimizer(optimizer)):  # which wants each of its variables
        known = {id(v): g for g, v in zip(gradients, variables, strict=True)}
        gradients, variables = [known.get(id(v)) for v in trainable], list(trainable)
    _apply(optimizer, gradients, variables)
    for single in singles:
        _overwrite_by_averages(single, assign)


@contextlib.contextmanager
def rows_in_order(
    optimizer: keras.Optimizer, gradients: Sequence[Any]
) -> Iterator[None]:
    """Inside, ranks that apply the same ``tf.IndexedSlices`` get the same variables.

    Also on GPUs; see ``collective.tensorflow_ops.rows``. What an optimizer would scatter
    into a variable is made dense first.
    """
    if not parts_ranks(gradients):
        yield
        return
    with contextlib.ExitStack() as inside:
        inside.enter_context(added_in_order(gradients))
        for single in single_optimizers(optimizer):
            for name in ("assign_add", "assign_sub"):
                write = getattr(single, name)
                inside.enter_context(
                    replacing(single, name, lambda v, x, to=write: to(v, dense(x)))
                )
        yield


def _overwrite_by_averages(
    single: keras.Optimizer,
    assign: Callable[[Sequence[Any], Sequence[tf.Tensor]], None],
) -> None:
    """What ``apply`` says of ``ema_overwrite_frequency``."""
    every = single.ema_overwrite_frequency
    if not single.use_ema or every is None:
        return
    steps = tf.convert_to_tensor(single.iterations)  # 0 where none was applied yet
    due = tf.logical_and(steps > 0, steps % int(every) == 0)
    written, values = [], []
    for variable, average in zip(
        single._trainable_variables, single._model_variables_moving_average, strict=True
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
    whole = [len(flatten_partitioned([v])) == 1 for v in variables]
    if all(whole):
        with rows_in_order(optimizer, gradients):
            optimizer.apply(gradients, variables)
        return
    # By the norm of the whole gradient. Keras clips again, by the norms of the pieces:
    # these are no larger, so nothing changes.
    gradients = core_optimizer(optimizer)._clip_gradients(list(gradients))
    cut: list[tf.Tensor] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        pieces = flatten_partitioned([variable])
        rows = [piece.shape[0] for piece in pieces] if variable.shape else []
        cut += tf.split(gradient, rows) if len(rows) > 1 else [gradient]
    optimizer.apply(cut, flatten_partitioned(variables))
    for variable, is_whole in zip(variables, whole, strict=True):
        if not is_whole and variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def count_atomically(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer's step counter right where workers update it concurrently.

    Keras reads it, adds one and writes it, which loses counts.
    """
    for each in (core_optimizer(optimizer), *single_optimizers(optimizer)):
        each.iterations.assign_add = each.iterations.value.assign_add


@contextlib.contextmanager
def variables_seen(
    optimizers: Iterable[keras.Optimizer],
    on_made: Callable[[keras.Variable], None],
) -> Iterator[None]:
    """Inside, a function is called with each variable that optimizers make."""

    def seeing(track: Callable[[Any], None]) -> Callable[[Any], None]:
        def tracked(variable: Any) -> None:
            track(variable)
            on_made(variable)

        return tracked

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            for single in {
                id(o): o for o in (optimizer, core_optimizer(optimizer))
            }.values():
                new = seeing(single._track_variable)
                stack.enter_context(replacing(single, "_track_variable", new))
        yield


def replace_value(variable: keras.Variable, value: tf.Tensor) -> None:
    """Gives a variable a value of another shape."""
    kept = tf.Variable(value, trainable=False, name=variable.name, dtype=variable.dtype)
    variable._value, variable._shape = kept, tuple(kept.shape)


def build_optimizer(
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
    on_variable_devices: bool = False,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Builds an optimizer that is not built.

    Args:
        on_variable_devices: Whether each slot is on its variable's device.

    Returns:
        Its slots (variables shaped as one of the model's), each with the model's
        variable.
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


def update_on_variable_devices(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer update each variable on the variable's device."""
    core = core_optimizer(optimizer)
    update = core.update_step

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(variable.device):
            return update(gradient, variable, learning_rate)

    core.update_step = update_step


def replace_clipping(
    optimizer: keras.Optimizer,
    clip: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """Has a function clip un-scaled gradients; returns the one that it replaces."""
    core = core_optimizer(optimizer)
    own, core._clip_gradients = core._clip_gradients, clip
    return own


def clip_shards(
    optimizer: keras.Optimizer,
    summed: Callable[[list[tf.Tensor], Sequence[keras.Variable]], list[tf.Tensor]],
) -> None:
    """Has gradients clipped by norms of which this process has a part.

    Args:
        summed: From the sums of squares here, of the gradients of which variables, to
            those of whole gradients.
    """
    core = core_optimizer(optimizer)
    applies, clips = core._backend_apply_gradients, core._clip_gradients
    variables: list[keras.Variable] = []

    def apply(grads: Any, trainable_variables: Any) -> None:
        variables[:] = trainable_variables
        applies(grads, trainable_variables)
        variables.clear()

    def clip(grads: Sequence[Any]) -> list[Any]:
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
        # What is infinite makes everything NaN, as in Keras, which adds look-ups up.
        divisor = tf.maximum(norm, limit) / limit + (norm - norm)
        return [_over(tf.convert_to_tensor(g), divisor) for g in grads]

    core._backend_apply_gradients, core._clip_gradients = apply, clip


def _over(gradient: Any, divisor: tf.Tensor) -> Any:
    """A gradient, or each look-up in it, divided by a scalar."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    values = gradient.values if is_sparse else gradient
    values /= tf.cast(divisor, values.dtype)
    if not is_sparse:
        return values
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def find_overflow(
    optimizer: keras.Optimizer, everywhere: Callable[[tf.Tensor], tf.Tensor]
) -> None:
    """Has a LossScaleOptimizer skip an update where gradients of another process overflow.

    Args:
        everywhere: From whether those here are finite to whether all are.
    """
    if expects_overflow(optimizer):
        here = optimizer.check_finite
        optimizer.check_finite = lambda grads: everywhere(here(grads))


@contextlib.contextmanager
def replace_shapes(
    shapes: Sequence[tuple[keras.Variable, tuple[int, ...]]],
) -> Iterator[None]:
    """Inside, variables accept values of these shapes in a StatelessScope."""
    with contextlib.ExitStack() as stack:
        for variable, shape in shapes:
            stack.enter_context(replacing(variable, "_shape", shape))
        yield


def loss_scale(optimizer: keras.Optimizer) -> tf.Tensor:
    """The factor of the loss, by which ``apply`` divides gradients."""
    return tf.cast(optimizer.scale_loss(tf.ones([], tf.float32)), tf.float32)


def expects_overflow(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer itself skips updates that are not finite."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def finish(optimizer: keras.Optimizer, variables: Iterable[keras.Variable]) -> None:
    """What Keras does at the end of ``fit``: averages of the weights replace them."""
    core = core_optimizer(optimizer)
    core.finalize_variable_values(flatten_partitioned(variables))


@contextlib.contextmanager
def dense_gradients(optimizer: keras.Optimizer) -> Iterator[None]:
    """Inside, the optimizer sees the sum of the look-ups of each row of a table."""
    original = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        dense = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        return original(dense, trainable_variables)

    with replacing(optimizer, "apply", apply):
        yield


def applied_to(optimizer: Any, variables: Any) -> list[Any]:
    """The variables that ``apply`` was given, or those the optimizer was built for."""
    if variables is None:
        variables = core_optimizer(optimizer)._trainable_variables
    return list(variables)


@contextlib.contextmanager
def only_builds(builds: bool = True) -> Iterator[None]:
    """Inside, optimizers apply nothing; those that would have may be built at its end."""
    noted: list[tuple[keras.Optimizer, list[Any]]] = []

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        noted.append((self, applied_to(self, trainable_variables)))

    with contextlib.ExitStack() as stack:
        for kind in optimizers_with_apply():
            stack.enter_context(replacing(kind, "apply", apply))
        yield
    for optimizer, variables in noted:
        if builds and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
