"""``DistributedOptimizer`` with the arguments in the order of Horovod's Keras face."""

from __future__ import annotations

from typing import Any

from collective.operations.kinds import Average
from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.gradients import Groups
from collective.tensorflow.optimizer import (
    DistributedOptimizer as TensorFlowDistributedOptimizer,
)
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
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """As ``collective.tensorflow.DistributedOptimizer``."""
    return TensorFlowDistributedOptimizer(
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
