"""A Keras 3 optimizer that reduces its gradients over the ranks before it uses them.

Every call of a Keras optimizer, by ``model.fit`` or by a loop of your own, goes through
``apply``. There the gradients are reduced; then Keras clips, decays and updates as
always. ``update_step``, the innermost step, raises an error for gradients that did not
go through it, so no training skips the reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from collective import tensorflow_ops
from collective.errors import CollectiveError
from collective.operations.kinds import Min
from collective.tensorflow.collectives import Tensor
from collective.tensorflow.gradient_aggregation import Accumulation
from collective.tensorflow.gradients import GradientReduction
from collective.tensorflow.keras_methods import replace_for
from collective.tensorflow.process_sets import group_of
from collective.tensorflow_ops.xla import compiled_around_collectives


class CallableList(list[Any]):
    """The variables of an optimizer; older scripts call ``optimizer.variables()``."""

    def __call__(self) -> CallableList:
        """Return the list itself."""
        return self


class Distributed(keras.optimizers.Optimizer):
    """Mixed into the class of the wrapped optimizer."""

    _reduction: GradientReduction
    _accumulation: Accumulation | None = None
    _summed = False

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Tensor | None], trainable_variables: Any = None
    ) -> None:
        """Reduce the gradients over the ranks, and apply them.

        With ``backward_passes_per_step``, most calls only add the gradients up.
        """
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        grads, variables = list(grads), list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        accumulation = self._accumulation
        if accumulation is None:
            self._apply_reduced(grads, variables)
            return

        def update() -> bool:
            self._apply_reduced(accumulation.take(), variables)
            return True

        def wait() -> bool:
            if COUNTS_PASSES:
                self._iterations.assign_add(1)
            return False

        accumulation.add(grads, variables)
        tf.cond(accumulation.full(), update, wait)

    def _apply_reduced(
        self, gradients: Sequence[Tensor | None], variables: Sequence[Any]
    ) -> None:
        reduced = self._reduction(gradients, variables)
        self._summed = True
        try:
            super().apply(reduced, variables)
        finally:
            self._summed = False

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Any) -> None:
        """Call the optimizer's own; raise a CollectiveError for unreduced gradients."""
        if not self._summed:
            raise CollectiveError(
                f"{type(self).__name__} got gradients that were not summed over the "
                f"ranks: keras {keras.__version__} did not call apply()",
                hint="call optimizer.apply_gradients or optimizer.apply; if you did, "
                "use a Keras that the tests have run with",
            )
        super().update_step(gradient, variable, learning_rate)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradient to this process alone."""
        self._reduction.register_local(var)

    def flush(self) -> None:
        """Apply the gradients that were added up for an update that is not complete.

        ``fit`` does so at its end; every rank must, after equally many passes.
        """
        accumulation = self._accumulation
        if accumulation is None or not accumulation.pending():
            return
        self._apply_reduced(accumulation.take(), self._trainable_variables)
        if COUNTS_PASSES:
            # Continue with the passes of the next update.
            passes, done = accumulation.passes, int(self._iterations.numpy())
            self._iterations.assign(-(-done // passes) * passes)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Flush, and do what Keras does at the end of ``fit``."""
        self.flush()
        super().finalize_variable_values(var_list)

    @property
    def variables(self) -> CallableList:
        """Return the variables, in a list that can also be called."""
        return CallableList(super().variables)


# Optimizers of Keras 3.15 distinguish passes, which learning-rate schedules count, from
# updates, which the bias correction of Adam counts. In Keras 3.3 both are updates.
COUNTS_PASSES = isinstance(
    getattr(keras.optimizers.Optimizer, "iterations", None), property
)


def _iterations(self: Any) -> Any:
    """Return the number of updates; a learning-rate schedule gets the passes."""
    if self._accumulation is None:
        return keras.optimizers.Optimizer.iterations.fget(self)
    return keras.ops.floor_divide(self._iterations, self._accumulation.passes)


@functools.cache
def _distributed(kind: Any) -> Any:
    """Return the class of a wrapped optimizer.

    It has the name and module of the original, because a saved model contains these, so
    the model can be loaded in a program that is not distributed.
    """
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if COUNTS_PASSES:
        members["iterations"] = property(_iterations)
    return type(kind.__name__, (Distributed, kind), members)


# exclude_from_weight_decay sets it; Keras' configuration leaves it out.
_NOT_IN_CONFIG = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer, or the one that it wraps, reduces gradients."""
    return isinstance(getattr(optimizer, "inner_optimizer", optimizer), Distributed)


def distribute(
    optimizer: keras.optimizers.Optimizer,
    reduction: GradientReduction,
    passes: int = 1,
    average: bool = False,
    name: str | None = None,
) -> keras.optimizers.Optimizer:
    """Return a new optimizer like the given one, with its state, that reduces.

    Args:
        optimizer: An optimizer of Keras 3. A LossScaleOptimizer stays outside: it skips
            an update on all ranks when one rank has an overflow.
        reduction: How gradients are reduced.
        passes: The number of backward passes in an update.
        average: Whether the mean of the passes is applied, not the sum.
        name: The name of the new optimizer; the old one's by default.

    Raises:
        ValueError: If it is wrapped already, or is not an optimizer of Keras 3.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            f"{optimizer!r} is not an optimizer of Keras 3\n"
            "HINT: keras.optimizers.Adam(...), for example"
        )
    if is_distributed(optimizer):
        raise ValueError(
            "this optimizer is a DistributedOptimizer already: it would sum twice"
        )
    kind: Any = type(optimizer)
    config = optimizer.get_config()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = distribute(optimizer.inner_optimizer, reduction, passes, average)
        config = {k: v for k, v in config.items() if k != "inner_optimizer"}
        wrapped = kind(inner, **config)
    else:
        wrapped = _distributed(kind).from_config(config)
        for attribute in _NOT_IN_CONFIG:
            if hasattr(optimizer, attribute):
                setattr(wrapped, attribute, getattr(optimizer, attribute))
        wrapped._reduction = reduction
        wrapped._accumulation = Accumulation(passes, average) if passes > 1 else None
    replace_for(wrapped, _REPLACED)
    if name is not None:
        wrapped.name = name
    if optimizer.built:
        wrapped.build(optimizer._trainable_variables)
        for mine, theirs in zip(wrapped.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    return wrapped


def _agrees_on_overflow(check_finite: Any) -> Any:
    """Make all ranks skip an update if one rank's gradients are not finite.

    Under mixed precision Keras looks for overflows before it calls the optimizer: one
    rank would skip, and the others would wait for its gradients.
    """

    def everywhere(self: Any, grads: Any) -> tf.Tensor:
        finite = check_finite(self, grads)
        if not is_distributed(self):
            return finite
        process_set = self.inner_optimizer._reduction.process_set
        if not process_set.included():
            return finite
        (everyone,) = tensorflow_ops.all_reduce(
            [tf.cast(finite, tf.int32)], Min, None, group_of(process_set)
        )
        return tf.cast(everyone, tf.bool)

    return everywhere


def _compiles_around_sums(make_train_function: Any) -> Any:
    """Have XLA compile a step around its sums over ranks, for which it has no kernel.

    Keras' ``jit_compile``, its default on a GPU, compiles the whole step or fails.
    """

    def around_sums(self: Any, force: bool = False) -> Any:
        if is_distributed(getattr(self, "optimizer", None)) and self.jit_compile:
            self.jit_compile = False
            self.train_step = compiled_around_collectives(self.train_step)
        return make_train_function(self, force)

    return around_sums


_REPLACED = (
    (keras.optimizers.LossScaleOptimizer, "check_finite", _agrees_on_overflow),
    (keras.Model, "make_train_function", _compiles_around_sums),
)
