"""Horovod's TensorFlow interface over the native core: replace one word.

>>> import collective.tensorflow as hvd
>>> hvd.init()
>>> tape = hvd.DistributedGradientTape(tape)

Every public name of ``horovod.tensorflow`` 0.28.1, on Keras 3. docs/reference/horovod.md says
where the two differ.
"""

# ruff: noqa: I001
# fmt: off
from collective.common.util import (
    check_extension, gloo_built, gpu_available, mpi_built,
    num_rank_is_power_2 as check_num_rank_power_of_2, split_list,
)
from collective.operations.kinds import Average, Max, Min, Product, Sum
from collective.tensorflow import elastic
from collective.tensorflow.basics import (
    ccl_built, cross_rank, cross_size, cuda_built, ddl_built, gloo_enabled,
    init, is_homogeneous, is_initialized, local_rank, local_rank_op, local_size,
    local_size_op, mpi_enabled, mpi_threads_supported, nccl_built,
    process_set_included_op, rank, rank_op, rocm_built, shutdown, size, size_op,
    start_timeline, stop_timeline,
)
from collective.tensorflow.collectives import (
    allgather, allreduce, alltoall, barrier, broadcast, grouped_allgather,
    grouped_allreduce, grouped_reducescatter, join, reducescatter,
)
from collective.tensorflow.compression import Compression
from collective.tensorflow.functions import (
    allgather_object, broadcast_, broadcast_global_variables, broadcast_object,
    broadcast_object_fn, broadcast_variables, BroadcastGlobalVariablesHook,
)
from collective.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from collective.tensorflow.gradients import (
    DistributedGradientTape, PartialDistributedGradientTape,
)
from collective.tensorflow.optimizer import (
    DistributedOptimizer, PartialDistributedOptimizer,
)
from collective.tensorflow.process_sets import (
    add_process_set, global_process_set, ProcessSet, remove_process_set,
)
from collective.tensorflow.reductions import (
    Adasum, chosen_reduction as handle_average_backwards_compatibility,
)
from collective.tensorflow.sync_batch_norm import SyncBatchNormalization
from collective.tensorflow.util import refs_to_vars, vars_to_refs

__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression",
    "DistributedGradientTape", "DistributedOptimizer", "LocalGradientAggregationHelper",
    "Max", "Min", "PartialDistributedGradientTape", "PartialDistributedOptimizer",
    "ProcessSet", "Product", "Sum", "SyncBatchNormalization", "add_process_set",
    "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast",
    "broadcast_", "broadcast_global_variables", "broadcast_object",
    "broadcast_object_fn", "broadcast_variables", "ccl_built", "check_extension",
    "check_num_rank_power_of_2", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "elastic", "global_process_set", "gloo_built", "gloo_enabled", "gpu_available",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter",
    "handle_average_backwards_compatibility", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_rank_op", "local_size",
    "local_size_op", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "process_set_included_op", "rank", "rank_op", "reducescatter", "refs_to_vars",
    "remove_process_set", "rocm_built", "shutdown", "size", "size_op", "split_list",
    "start_timeline", "stop_timeline", "vars_to_refs",
]
