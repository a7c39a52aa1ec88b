"""``horovod.tensorflow.mpi_ops``: the operations, and this process' place in the job."""

from collective.common.util import gpu_available as gpu_available
from collective.tensorflow import Adasum as Adasum
from collective.tensorflow import Average as Average
from collective.tensorflow import Max as Max
from collective.tensorflow import Min as Min
from collective.tensorflow import ProcessSet as ProcessSet
from collective.tensorflow import Product as Product
from collective.tensorflow import Sum as Sum
from collective.tensorflow import add_process_set as add_process_set
from collective.tensorflow import allgather as allgather
from collective.tensorflow import alltoall as alltoall
from collective.tensorflow import barrier as barrier
from collective.tensorflow import broadcast as broadcast
from collective.tensorflow import broadcast_ as broadcast_
from collective.tensorflow import ccl_built as ccl_built
from collective.tensorflow import check_num_rank_power_of_2 as check_num_rank_power_of_2
from collective.tensorflow import cross_rank as cross_rank
from collective.tensorflow import cross_size as cross_size
from collective.tensorflow import cuda_built as cuda_built
from collective.tensorflow import ddl_built as ddl_built
from collective.tensorflow import global_process_set as global_process_set
from collective.tensorflow import gloo_built as gloo_built
from collective.tensorflow import gloo_enabled as gloo_enabled
from collective.tensorflow import grouped_allgather as grouped_allgather
from collective.tensorflow import (
    handle_average_backwards_compatibility as handle_average_backwards_compatibility,
)
from collective.tensorflow import init as init
from collective.tensorflow import is_homogeneous as is_homogeneous
from collective.tensorflow import is_initialized as is_initialized
from collective.tensorflow import join as join
from collective.tensorflow import local_rank as local_rank
from collective.tensorflow import local_rank_op as local_rank_op
from collective.tensorflow import local_size as local_size
from collective.tensorflow import local_size_op as local_size_op
from collective.tensorflow import mpi_built as mpi_built
from collective.tensorflow import mpi_enabled as mpi_enabled
from collective.tensorflow import mpi_threads_supported as mpi_threads_supported
from collective.tensorflow import nccl_built as nccl_built
from collective.tensorflow import process_set_included_op as process_set_included_op
from collective.tensorflow import rank as rank
from collective.tensorflow import rank_op as rank_op
from collective.tensorflow import remove_process_set as remove_process_set
from collective.tensorflow import rocm_built as rocm_built
from collective.tensorflow import shutdown as shutdown
from collective.tensorflow import size as size
from collective.tensorflow import size_op as size_op
from collective.tensorflow import start_timeline as start_timeline
from collective.tensorflow import stop_timeline as stop_timeline
