"""Every public name of Horovod 0.28.1 is here, and takes what Horovod's takes."""

import importlib
import inspect

import pytest

pytest.importorskip("tensorflow")

# Names that Horovod's modules merely import for themselves (check_extension,
# vars_to_refs, LocalGradientAggregationHelper, ...) are left out.
PLACE = """
    init shutdown is_initialized start_timeline stop_timeline size local_size
    cross_size rank local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built
    gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
"""
NAMES = {
    "tensorflow": PLACE
    + """
    elastic Compression allgather_object broadcast_object broadcast_object_fn
    broadcast_variables allgather grouped_allgather broadcast broadcast_ alltoall
    is_homogeneous rank_op local_rank_op size_op local_size_op process_set_included_op
    ProcessSet global_process_set add_process_set remove_process_set Average Sum Adasum
    Min Max Product join barrier SyncBatchNormalization allreduce reducescatter
    grouped_allreduce grouped_reducescatter broadcast_global_variables
    BroadcastGlobalVariablesHook DistributedOptimizer DistributedGradientTape
    PartialDistributedGradientTape PartialDistributedOptimizer
    """,
    "tensorflow.compression": "Compressor NoneCompressor FP16Compressor Compression",
    "tensorflow.elastic": "run State ObjectState TensorFlowKerasState TensorFlowState",
    "tensorflow.keras": PLACE
    + """
    ProcessSet global_process_set add_process_set remove_process_set Average Sum
    Compression callbacks elastic DistributedOptimizer broadcast_global_variables
    allreduce allgather broadcast reducescatter load_model
    """,
    "keras": PLACE
    + """
    Average Sum Adasum Compression global_process_set callbacks elastic
    DistributedOptimizer PartialDistributedOptimizer broadcast_global_variables
    allreduce allgather broadcast reducescatter load_model
    """,
    "tensorflow.keras.callbacks": """
    BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback
    LearningRateWarmupCallback BestModelCheckpoint
    """,
    "tensorflow.keras.elastic": """
    KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback run
    """,
}
NAMES["keras.callbacks"] = NAMES["tensorflow.keras.callbacks"]
NAMES["keras.elastic"] = NAMES["tensorflow.keras.elastic"]

# Arguments in Horovod's order: scripts pass some of them by position.
ARGUMENTS = {
    "tensorflow.init": "comm process_sets",
    "tensorflow.allreduce": "tensor average device_dense device_sparse compression op "
    "prescale_factor postscale_factor name process_set ignore_name_scope",
    "tensorflow.grouped_allreduce": "tensors average device_dense device_sparse "
    "compression op prescale_factor postscale_factor process_set ignore_name_scope name",
    "tensorflow.allgather": "tensor name ignore_name_scope process_set",
    "tensorflow.grouped_allgather": "tensors name ignore_name_scope process_set",
    "tensorflow.broadcast": "tensor root_rank name ignore_name_scope process_set",
    "tensorflow.broadcast_": "variables root_rank name process_set",
    "tensorflow.alltoall": "tensor splits name ignore_name_scope process_set",
    "tensorflow.reducescatter": "tensor device_dense compression op name process_set "
    "ignore_name_scope prescale_factor postscale_factor",
    "tensorflow.grouped_reducescatter": "tensors device_dense compression op process_set "
    "prescale_factor postscale_factor",
    "tensorflow.broadcast_variables": "variables root_rank process_set inplace",
    "tensorflow.broadcast_object": "obj root_rank session name process_set",
    "tensorflow.broadcast_object_fn": "root_rank session name process_set",
    "tensorflow.allgather_object": "obj session name process_set",
    "tensorflow.size_op": "process_set_id name",
    "tensorflow.rank_op": "name",
    "tensorflow.start_timeline": "file_path mark_cycles",
    "tensorflow.DistributedOptimizer": "optimizer name use_locking device_dense "
    "device_sparse compression sparse_as_dense backward_passes_per_step op "
    "gradient_predivide_factor average_aggregated_gradients num_groups groups "
    "process_set scale_local_gradients",
    "tensorflow.DistributedGradientTape": "gradtape device_dense device_sparse "
    "compression sparse_as_dense op gradient_predivide_factor num_groups groups "
    "process_set scale_local_gradients",
    "tensorflow.PartialDistributedGradientTape": "gradtape device_dense device_sparse "
    "compression sparse_as_dense op gradient_predivide_factor num_groups groups "
    "process_set local_layers scale_local_gradients",
    "tensorflow.keras.DistributedOptimizer": "optimizer name device_dense device_sparse "
    "compression sparse_as_dense gradient_predivide_factor op backward_passes_per_step "
    "average_aggregated_gradients num_groups groups process_set scale_local_gradients",
    "keras.PartialDistributedOptimizer": "optimizer name device_dense device_sparse "
    "compression sparse_as_dense gradient_predivide_factor op groups process_set "
    "local_layers scale_local_gradients",
    "tensorflow.keras.allreduce": "value name average prescale_factor postscale_factor "
    "op compression",
    "tensorflow.keras.broadcast": "value root_rank name",
    "tensorflow.keras.reducescatter": "value name op",
    "tensorflow.keras.load_model": "filepath custom_optimizers custom_objects "
    "compression legacy_opts",
    "keras.callbacks.BroadcastGlobalVariablesCallback": "root_rank device "
    "local_variables",
    "keras.callbacks.LearningRateScheduleCallback": "initial_lr multiplier start_epoch "
    "end_epoch staircase momentum_correction steps_per_epoch",
    "keras.callbacks.LearningRateWarmupCallback": "initial_lr warmup_epochs "
    "momentum_correction steps_per_epoch verbose",
    "keras.callbacks.BestModelCheckpoint": "monitor verbose save_weights_only mode "
    "save_freq",
    "keras.elastic.CommitStateCallback": "state batches_per_commit",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_is_here(module):
    found = importlib.import_module(f"collective.{module}")
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_come_in_horovods_order(name):
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(f"collective.{module}"), function)
    here = list(inspect.signature(found).parameters)
    theirs = ARGUMENTS[name].split()
    assert here[: len(theirs)] == theirs
