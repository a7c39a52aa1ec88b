"""``DistributedOptimizer``: wraps an optimizer of Keras 3 or of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.operations.kinds import Average, Sum
from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.gradients import (
    GradientReduction,
    Groups,
    old_groups,
    variables_of,
)
from collective.tensorflow.keras_optimizer import distribute
from collective.tensorflow.process_sets import ProcessSet, global_process_set
from collective.tensorflow.reductions import Adasum, Reduction, chosen
from collective.tensorflow.v1_optimizer import DistributedV1Optimizer


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like the given one, whose gradients are those of all ranks.

    Args:
        optimizer: Of Keras 3, or of ``tf.compat.v1.train``.
        name: Of the new one.
        use_locking: For an optimizer of TensorFlow 1.
        backward_passes_per_step: Calls whose gradients are added up for an update.
        average_aggregated_gradients: Whether their mean is applied, not their sum.
        num_groups: The old name of ``groups``.
        device_dense, device_sparse, compression, sparse_as_dense, op,
            gradient_predivide_factor, groups, process_set, scale_local_gradients: As
            for ``GradientReduction``.

    Returns:
        The new optimizer. With Keras its class derives from the given one's.

    Raises:
        ValueError: For options that do not go together, or no optimizer.
        NotImplementedError: For what an optimizer of TensorFlow 1 cannot do here.
    """
    op = chosen(op)
    if op is Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    reduction = GradientReduction(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=old_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
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


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Reduction = Average,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As ``DistributedOptimizer``, but for the gradients of some layers.

    Args:
        local_layers: Layers whose gradients stay this process' own.

    Raises:
        ValueError: For what is no layer, or has no variables yet.
    """
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    local = variables_of(local_layers)
    inner = getattr(wrapped, "inner_optimizer", wrapped)
    for variable in local:
        inner.register_local_var(variable)
    return wrapped
