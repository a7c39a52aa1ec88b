"""``DistributedOptimizer``: wraps an optimizer of Keras 3 or of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.errors import CollectiveError
from collective.operations.kinds import Average, Sum
from collective.tensorflow.gradients import GradientReduction
from collective.tensorflow.keras_optimizer import distribute
from collective.tensorflow.reductions import Adasum
from collective.tensorflow.signatures import ordered


@ordered(
    "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor "
    "average_aggregated_gradients num_groups groups process_set "
    "scale_local_gradients local_layers",
    GradientReduction,
)
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **options: Any,
) -> Any:
    """Return an optimizer like the given one that reduces gradients over all ranks.

    Args:
        optimizer: An optimizer of Keras 3, or of ``tf.compat.v1.train``.
        name: The name of the new optimizer.
        use_locking: For an optimizer of TensorFlow 1.
        backward_passes_per_step: Calls whose gradients are added up for an update.
        average_aggregated_gradients: Whether the mean of the passes is applied, not the
            sum.
        **options: As for ``GradientReduction``.

    Returns:
        The new optimizer. For Keras its class derives from the given one's.

    Raises:
        ValueError: If options do not go together, or ``optimizer`` is none.
        NotImplementedError: If an optimizer of TensorFlow 1 cannot do it here.
    """
    reduction = GradientReduction(**options)
    op = reduction.op
    if op is Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step > 1:
            raise NotImplementedError(
                "backward_passes_per_step > 1 with an optimizer of TensorFlow 1\n"
                "HINT: use an optimizer of Keras, as keras.optimizers.SGD"
            )
        if op is Adasum:
            raise NotImplementedError(
                "op=Adasum with an optimizer of TensorFlow 1 reduces the changes of "
                "variables, which is not done here\n"
                "HINT: hvd.DistributedGradientTape(op=hvd.Adasum) reduces gradients"
            )
        return DistributedV1Optimizer(optimizer, reduction, name, use_locking)
    if op not in (Average, Sum):
        raise ValueError(
            "op currently only supports Average and Sum\n"
            "HINT: hvd.DistributedGradientTape takes any op"
        )
    return distribute(
        optimizer,
        reduction,
        backward_passes_per_step,
        average_aggregated_gradients,
        name,
    )


@ordered(
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op groups process_set local_layers "
    "scale_local_gradients",
    DistributedOptimizer,
)
def PartialDistributedOptimizer(**options: Any) -> Any:
    """Call ``DistributedOptimizer`` with layers whose gradients stay local."""
    return DistributedOptimizer(**options)


class DistributedV1Optimizer(tf.compat.v1.train.Optimizer):
    """Reduces in ``compute_gradients``; the rest is the wrapped optimizer's.

    Args:
        optimizer: The wrapped optimizer.
        reduction: How gradients are reduced.
        name: ``Distributed`` and the optimizer's class by default.
        use_locking: As for the wrapped optimizer.
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        reduction: GradientReduction,
        name: str | None = None,
        use_locking: bool = False,
    ):
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._reduced = False
        self.get_slot = optimizer.get_slot
        self.get_slot_names = optimizer.get_slot_names
        self.variables = optimizer.variables

    def register_local_var(self, var: Any) -> None:
        """Leave a variable's gradient to this process alone."""
        self._reduction.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the wrapped optimizer's gradients, reduced over the ranks."""
        gradients, variables = zip(
            *self._optimizer.compute_gradients(*args, **kwargs), strict=True
        )
        self._reduced = True
        return list(zip(self._reduction(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped optimizer's method.

        Raises:
            CollectiveError: If ``compute_gradients`` was never called.
        """
        if not self._reduced:
            raise CollectiveError(
                f"{self._name} got gradients that were not summed over the ranks",
                hint="call minimize() or compute_gradients(), or take them from "
                "hvd.DistributedGradientTape and apply them with the plain optimizer",
            )
        return self._optimizer.apply_gradients(*args, **kwargs)
