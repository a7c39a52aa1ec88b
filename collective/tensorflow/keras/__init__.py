"""Horovod's Keras interface over the native core: replace one word.

>>> import collective.tensorflow.keras as hvd
>>> hvd.init()
>>> model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())))

Every public name of ``horovod.tensorflow.keras`` 0.28.1; ``collective.keras`` is the
same, for ``horovod.keras``.
"""

from collective.tensorflow import Adasum as Adasum
from collective.tensorflow import Average as Average
from collective.tensorflow import Compression as Compression
from collective.tensorflow import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from collective.tensorflow import ProcessSet as ProcessSet
from collective.tensorflow import Sum as Sum
from collective.tensorflow import add_process_set as add_process_set
from collective.tensorflow import (
    broadcast_global_variables as broadcast_global_variables,
)
from collective.tensorflow import ccl_built as ccl_built
from collective.tensorflow import cross_rank as cross_rank
from collective.tensorflow import cross_size as cross_size
from collective.tensorflow import cuda_built as cuda_built
from collective.tensorflow import ddl_built as ddl_built
from collective.tensorflow import global_process_set as global_process_set
from collective.tensorflow import gloo_built as gloo_built
from collective.tensorflow import gloo_enabled as gloo_enabled
from collective.tensorflow import init as init
from collective.tensorflow import is_initialized as is_initialized
from collective.tensorflow import local_rank as local_rank
from collective.tensorflow import local_size as local_size
from collective.tensorflow import mpi_built as mpi_built
from collective.tensorflow import mpi_enabled as mpi_enabled
from collective.tensorflow import mpi_threads_supported as mpi_threads_supported
from collective.tensorflow import nccl_built as nccl_built
from collective.tensorflow import rank as rank
from collective.tensorflow import remove_process_set as remove_process_set
from collective.tensorflow import rocm_built as rocm_built
from collective.tensorflow import shutdown as shutdown
from collective.tensorflow import size as size
from collective.tensorflow import start_timeline as start_timeline
from collective.tensorflow import stop_timeline as stop_timeline
from collective.tensorflow.keras import callbacks as callbacks
from collective.tensorflow.keras import elastic as elastic
from collective.tensorflow.keras.interface import (
    DistributedOptimizer as DistributedOptimizer,
)
from collective.tensorflow.keras.interface import allgather as allgather
from collective.tensorflow.keras.interface import allreduce as allreduce
from collective.tensorflow.keras.interface import broadcast as broadcast
from collective.tensorflow.keras.interface import load_model as load_model
from collective.tensorflow.keras.interface import reducescatter as reducescatter
