"""``horovod.tensorflow.gradient_aggregation``: gradients of several passes, added up.

It serves an optimizer of your own. ``DistributedOptimizer(backward_passes_per_step=)``
does the same without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collective.tensorflow.collectives import Tensor
from collective.tensorflow.functions import tf_variable
from collective.tensorflow.gradients import GradientReduction
from collective.tensorflow.process_sets import ProcessSet, global_process_set


def apply_op_to_not_none_tensors(
    tensor_op: Callable[..., Any], tensors: Sequence[Any], *args: Any
) -> list[Any]:
    """Return ``tensor_op(tensor, *args)`` of each tensor; None for None."""
    return [None if t is None else tensor_op(t, *args) for t in tensors]


def get_not_none_from_list(tensor_list: Sequence[Any]) -> list[Any]:
    """Return the elements that are not None."""
    return [t for t in tensor_list if t is not None]


class Accumulation:
    """Sums of gradients, and the number of passes in them.

    Its variables are its own: a saved optimizer does not contain them.

    Args:
        passes: The number of passes in an update.
        average: Whether the mean of the passes is applied, not the sum.
    """

    def __init__(self, passes: int, average: bool):
        self.passes = passes
        self.average = average
        self.count: Any = None  # a tf.Variable from the first pass on
        self.sums: list[tf.Variable] = []
        # Whether each variable ever had a gradient.
        self.seen: list[bool] = []

    def add(self, gradients: Sequence[Tensor | None], variables: Sequence[Any]) -> None:
        """Add the gradients of one pass; sparse ones become dense.

        Raises:
            ValueError: If these are not the variables of the previous passes.
        """
        if self.count is None:
            # Variables are made outside of a function that is being traced.
            with tf.init_scope():
                self.count = tf.Variable(0, trainable=False, dtype=tf.int64)
                self.sums = [
                    tf.Variable(
                        tf.zeros(v.shape, tf_variable(v).dtype), trainable=False
                    )
                    for v in variables
                ]
            self.seen = [False] * len(self.sums)
        if len(variables) != len(self.sums):
            raise ValueError(
                f"{len(variables)} variables, and {len(self.sums)} in the passes before\n"
                "HINT: with backward_passes_per_step, always pass the same variables"
            )
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self.seen[place] = True
                total = self.sums[place]
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        self.count.assign_add(1)

    def full(self) -> tf.Tensor:
        """Return whether it contains as many passes as an update needs."""
        return tf.equal(self.count, self.passes)

    def pending(self) -> bool:
        """Return whether it contains passes that no update has used; eager only."""
        return self.count is not None and int(self.count) > 0

    def take(self) -> list[tf.Tensor | None]:
        """Return the sums or means, and empty the accumulation."""
        divisor = self.count.read_value() if self.average else tf.constant(1, tf.int64)
        taken = [
            total.read_value() / tf.cast(divisor, total.dtype) if seen else None
            for total, seen in zip(self.sums, self.seen, strict=True)
        ]
        with tf.control_dependencies([t for t in taken if t is not None]):
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            self.count.assign(0)
        return taken


class LocalGradientAggregationHelper:
    """Adds up gradients, and reduces them when enough passes are in the sum.

    Args:
        backward_passes_per_step: The number of passes in an update.
        allreduce_func: Reduces ``(gradients, variables)`` over the ranks.
        sparse_as_dense: Not used: sums are dense.
        average_aggregated_gradients: Whether the mean over passes is reduced.
        rank, optimizer_type, name: Not used.
        process_set: The ranks that take part.
        scale_local_gradients: Whether the gradient of a local variable is divided by
            the number of ranks, like the gradient of a mean loss over all of them.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Tensor | None]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: Any,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ):
        self._allreduce = allreduce_func
        self._accumulation = Accumulation(
            backward_passes_per_step, average_aggregated_gradients
        )
        self._local = GradientReduction(
            process_set=process_set, scale_local_gradients=scale_local_gradients
        )

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradient to this process alone."""
        self._local.register_local(var)

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(
        self, grads: Sequence[Tensor | None], vars: Sequence[Any]
    ) -> list[Tensor | None]:
        """Add one pass.

        Args:
            grads: The gradients of the pass, or None.
            vars: Their variables, the same in each call.

        Returns:
            The reduced sums, with the last pass of an update. Zeros before that, which
            ``apply_gradients`` does not apply.
        """
        accumulation = self._accumulation
        accumulation.add(grads, vars)
        self._full = accumulation.full()
        seen = [i for i, was in enumerate(accumulation.seen) if was]

        def reduce() -> list[tf.Tensor]:
            reduced = self._reduce(accumulation.take(), vars)
            return [tf.convert_to_tensor(reduced[i]) for i in seen]

        def wait() -> list[tf.Tensor]:
            return [tf.zeros_like(accumulation.sums[i]) for i in seen]

        found = iter(tf.cond(self._full, reduce, wait))
        return [next(found) if was else None for was in accumulation.seen]

    def apply_gradients(
        self,
        apply_grads_closure: Callable[[], Any],
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the closure after the last pass of an update, else only count.

        Args:
            apply_grads_closure: Applies the result of ``compute_gradients``.
            optimizer: Its ``iterations`` count every pass.
            *args, **kwargs: Not used.
        """

        def apply() -> tf.Tensor:
            apply_grads_closure()
            return tf.constant(True)

        def count() -> tf.Tensor:
            if optimizer is not None and hasattr(optimizer, "iterations"):
                tf_variable(optimizer.iterations).assign_add(1)
            return tf.constant(False)

        return tf.cond(self._full, apply, count)

    def _reduce(
        self, gradients: list[Tensor | None], variables: Sequence[Any]
    ) -> list[Tensor | None]:
        local = self._local
        shared = [i for i, v in enumerate(variables) if not local.is_local(v)]
        reduced = self._allreduce(
            [gradients[i] for i in shared], [variables[i] for i in shared]
        )
        for i, gradient in zip(shared, reduced, strict=True):
            gradients[i] = gradient
        local.scale_local(gradients, variables)
        return gradients
