"""Horovod's TensorFlow interface over the native core: replace one word.

>>> import collective.tensorflow as hvd
>>> hvd.init()
>>> tape = hvd.DistributedGradientTape(tape)

Every public name of ``horovod.tensorflow`` 0.28.1, on Keras 3. docs/reference/horovod.md says
where the two differ.
"""

from collective.common.util import check_extension as check_extension
from collective.common.util import gpu_available as gpu_available
from collective.common.util import num_rank_is_power_2 as check_num_rank_power_of_2  # noqa: F401
from collective.common.util import split_list as split_list
from collective.operations.kinds import Average as Average
from collective.operations.kinds import Max as Max
from collective.operations.kinds import Min as Min
from collective.operations.kinds import Product as Product
from collective.operations.kinds import Sum as Sum
from collective.tensorflow import elastic as elastic
from collective.tensorflow.basics import ccl_built as ccl_built
from collective.tensorflow.basics import cross_rank as cross_rank
from collective.tensorflow.basics import cross_size as cross_size
from collective.tensorflow.basics import cuda_built as cuda_built
from collective.tensorflow.basics import ddl_built as ddl_built
from collective.tensorflow.basics import gloo_built as gloo_built
from collective.tensorflow.basics import gloo_enabled as gloo_enabled
from collective.tensorflow.basics import init as init
from collective.tensorflow.basics import is_homogeneous as is_homogeneous
from collective.tensorflow.basics import is_initialized as is_initialized
from collective.tensorflow.basics import local_rank as local_rank
from collective.tensorflow.basics import local_rank_op as local_rank_op
from collective.tensorflow.basics import local_size as local_size
from collective.tensorflow.basics import local_size_op as local_size_op
from collective.tensorflow.basics import mpi_built as mpi_built
from collective.tensorflow.basics import mpi_enabled as mpi_enabled
from collective.tensorflow.basics import mpi_threads_supported as mpi_threads_supported
from collective.tensorflow.basics import nccl_built as nccl_built
from collective.tensorflow.basics import (
    process_set_included_op as process_set_included_op,
)
from collective.tensorflow.basics import rank as rank
from collective.tensorflow.basics import rank_op as rank_op
from collective.tensorflow.basics import rocm_built as rocm_built
from collective.tensorflow.basics import shutdown as shutdown
from collective.tensorflow.basics import size as size
from collective.tensorflow.basics import size_op as size_op
from collective.tensorflow.basics import start_timeline as start_timeline
from collective.tensorflow.basics import stop_timeline as stop_timeline
from collective.tensorflow.collectives import allgather as allgather
from collective.tensorflow.collectives import allreduce as allreduce
from collective.tensorflow.collectives import alltoall as alltoall
from collective.tensorflow.collectives import barrier as barrier
from collective.tensorflow.collectives import broadcast as broadcast
from collective.tensorflow.collectives import grouped_allgather as grouped_allgather
from collective.tensorflow.collectives import grouped_allreduce as grouped_allreduce
from collective.tensorflow.collectives import (
    grouped_reducescatter as grouped_reducescatter,
)
from collective.tensorflow.collectives import join as join
from collective.tensorflow.collectives import reducescatter as reducescatter
from collective.tensorflow.compression import Compression as Compression
from collective.tensorflow.functions import (
    BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
)
from collective.tensorflow.functions import allgather_object as allgather_object
from collective.tensorflow.functions import broadcast_ as broadcast_
from collective.tensorflow.functions import (
    broadcast_global_variables as broadcast_global_variables,
)
from collective.tensorflow.functions import broadcast_object as broadcast_object
from collective.tensorflow.functions import broadcast_object_fn as broadcast_object_fn
from collective.tensorflow.functions import broadcast_variables as broadcast_variables
from collective.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper as LocalGradientAggregationHelper,
)
from collective.tensorflow.gradient_tape import (
    DistributedGradientTape as DistributedGradientTape,
)
from collective.tensorflow.gradient_tape import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from collective.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from collective.tensorflow.optimizer import (
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from collective.tensorflow.process_sets import ProcessSet as ProcessSet
from collective.tensorflow.process_sets import add_process_set as add_process_set
from collective.tensorflow.process_sets import global_process_set as global_process_set
from collective.tensorflow.process_sets import remove_process_set as remove_process_set
from collective.tensorflow.reductions import Adasum as Adasum
from collective.tensorflow.reductions import (
    chosen as handle_average_backwards_compatibility,  # noqa: F401
)
from collective.tensorflow.sync_batch_norm import (
    SyncBatchNormalization as SyncBatchNormalization,
)
from collective.tensorflow.util import refs_to_vars as refs_to_vars
from collective.tensorflow.util import vars_to_refs as vars_to_refs
