"""Horovod's Keras interface over the native core: replace one word.

>>> import collective.tensorflow.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())))

Every public name of ``horovod.tensorflow.keras`` 0.28.1; ``collective.keras`` is the
same, for ``horovod.keras``.
"""

# ruff: noqa: I001
# fmt: off
import collective.keras_backend  # noqa: F401  # isort: skip
from collective.tensorflow import (
    Adasum, add_process_set, Average, broadcast_global_variables, ccl_built,
    Compression, cross_rank, cross_size, cuda_built, ddl_built, global_process_set,
    gloo_built, gloo_enabled, init, is_initialized, local_rank, local_size, mpi_built,
    mpi_enabled, mpi_threads_supported, nccl_built, PartialDistributedOptimizer,
    ProcessSet, rank, remove_process_set, rocm_built, shutdown, size, start_timeline,
    stop_timeline, Sum,
)
from collective.tensorflow.keras import callbacks, elastic
from collective.tensorflow.keras.interface import (
    allgather, allreduce, broadcast, DistributedOptimizer, load_model, reducescatter,
)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer",
    "PartialDistributedOptimizer", "ProcessSet", "Sum", "add_process_set", "allgather",
    "allreduce", "broadcast", "broadcast_global_variables", "callbacks", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic",
    "global_process_set", "gloo_built", "gloo_enabled", "init", "is_initialized",
    "load_model", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "reducescatter",
    "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline",
    "stop_timeline",
]
