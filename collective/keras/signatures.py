"""What takes its arguments in another order than in ``collective.tensorflow.keras``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.operations.kinds import Average, Sum
from collective.tensorflow import keras as hvd
from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.gradients import Groups
from collective.tensorflow.process_sets import ProcessSet, global_process_set
from collective.tensorflow.reductions import Reduction


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Reduction = Average,
    num_groups: int = 0,
    groups: Groups | None = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """As ``collective.tensorflow.keras.DistributedOptimizer``.

    The last four arguments are those that ``horovod.keras`` has not.
    """
    return hvd.DistributedOptimizer(
        optimizer,
        name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Reduction | None = None,
    compression: type[Compressor] = Compression.none,
) -> tf.Tensor:
    """As ``collective.tensorflow.keras.allreduce``; ``op`` supersedes ``average``."""
    if op is None:
        op = Average if average else Sum
    return hvd.allreduce(
        value,
        name,
        None,
        prescale_factor,
        postscale_factor,
        op,
        compression,
    )
