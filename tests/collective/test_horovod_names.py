"""Every public name of Horovod 0.28.1 exists here (``test_horovod_signatures``: arguments)."""

import importlib
import pickle
import re

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
    "runner.common.util.env": "get_env_rank_and_size",
}
NAMES["keras.callbacks"] = NAMES["tensorflow.keras.callbacks"]
NAMES["keras.elastic"] = NAMES["tensorflow.keras.elastic"]


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_is_here(module):
    found = importlib.import_module(f"collective.{module}")
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing


def test_each_module_of_keras_has_its_own_callbacks():
    import collective.keras
    import collective.tensorflow.keras

    for face in collective.keras, collective.tensorflow.keras:
        assert face.callbacks.__name__ == f"{face.__name__}.callbacks"
        assert face.elastic.KerasState is collective.tensorflow.keras.elastic.KerasState


@pytest.mark.parametrize("module", ["tensorflow", "tensorflow.keras", "keras"])
def test_functions_are_pickled_by_their_names(module):
    found = importlib.import_module(f"collective.{module}")
    for name in "DistributedOptimizer", "allreduce", "allgather", "broadcast":
        function = getattr(found, name)
        assert pickle.loads(pickle.dumps(function)) is function


def test_the_version():
    import collective

    assert re.fullmatch(r"\d+\.\d+.*|0\+unknown", collective.__version__)
