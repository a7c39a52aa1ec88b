"""``DistributedOptimizer``: wraps an optimizer of Keras 3 or of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.operations.kinds import Average, Sum
from collective.tensorflow.gradients import GradientReduction
from collective.tensorflow.keras_optimizer import distribute
from collective.tensorflow.reductions import Adasum
from collective.tensorflow.signatures import ordered
from collective.tensorflow.v1_optimizer import DistributedV1Optimizer


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
    """An optimizer like the given one, whose gradients are those of all ranks.

    Args:
        optimizer: Of Keras 3, or of ``tf.compat.v1.train``.
        name: Of the new one.
        use_locking: For an optimizer of TensorFlow 1.
        backward_passes_per_step: Calls whose gradients are added up for an update.
        average_aggregated_gradients: Whether their mean is applied, not their sum.
        **options: As for ``GradientReduction``.

    Returns:
        The new optimizer. With Keras its class derives from the given one's.

    Raises:
        ValueError: For options that do not go together, or no optimizer.
        NotImplementedError: For what an optimizer of TensorFlow 1 cannot do here.
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
    """As ``DistributedOptimizer``, but for the gradients of ``local_layers``."""
    return DistributedOptimizer(**options)
