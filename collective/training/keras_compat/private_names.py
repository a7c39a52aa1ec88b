"""Two tables of the names inside Keras and TensorFlow that we use, checked at import.

If Keras or TensorFlow lacks a name, or Keras is newer than every version that the tests have
run with, a message says so before anything trains. A test compares the tables with the code.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.log import log

#: The newest versions that the tests have run with.
NEWEST = "3.15"
NEWEST_TENSORFLOW = "2.21"

#: By module of ``keras.src``, or class in it (``module:class``): names, space-separated. The
#: names of a class may be methods, or attributes that its methods set.
KERAS: Mapping[str, str] = {
    "backend": "compute_output_spec random",
    "backend.common.global_state": "get_global_attribute",
    "backend.common.stateless_scope": "in_stateless_scope",
    "backend.common.stateless_scope:StatelessScope": "losses state_mapping add_update",
    "backend.common.variables:Variable": (
        "_value _shape _dtype _path _initialize _direct_assign"
    ),
    "backend.tensorflow.optimizer:TFOptimizer": "_all_reduce_sum_gradients",
    "backend.tensorflow.trainer": "TFEpochIterator concat potentially_ragged_concat",
    "backend.tensorflow.trainer:TensorFlowTrainer": (
        "distribute_strategy make_train_function make_test_function "
        "make_predict_function"
    ),
    "callbacks.callback_list": "CallbackList",
    "distribution.distribution_lib": "Distribution distribution_lib",
    "layers.layer:Layer": "_flatten_layers _losses _metrics _call_has_training_arg",
    "layers.rnn.conv_lstm": "ConvLSTMCell",
    "layers.normalization.batch_normalization:BatchNormalization": (
        "_moments synchronized"
    ),
    "metrics.reduction_metrics": "Mean Sum",
    "optimizers.base_optimizer:BaseOptimizer": (
        "apply _trainable_variables add_variable add_variable_from_reference"
    ),
    "random.seed_generator": "global_seed_generator",
    "random.seed_generator:SeedGenerator": "next",
    "saving.saving_lib": "H5IOStore _save_state get_attr_skipset",
    "trainers.data_adapters": "get_data_adapter",
    "trainers.data_adapters.array_data_adapter": "ArrayDataAdapter",
    "trainers.data_adapters.array_data_adapter:ArrayDataAdapter": "get_tf_dataset",
    "trainers.data_adapters.array_slicing": (
        "can_slice_array slice_tensorflow_sparse_wrapper to_tensorflow_sparse_wrapper"
    ),
    "trainers.data_adapters.data_adapter": "DataAdapter",
    "trainers.data_adapters.data_adapter_utils": (
        "class_weight_to_sample_weights is_scipy_sparse scipy_sparse_to_tf_sparse "
        "unpack_x_y_sample_weight"
    ),
    "trainers.trainer:Trainer": (
        "_compile_loss _compile_metrics _loss_tracker _should_eval "
        "_symbolic_build _flatten_metrics_in_order"
    ),
    "trainers.data_adapters.generator_data_adapter": "GeneratorDataAdapter",
    "trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter": "generator",
    "utils.file_utils": "get_file",
    "utils.python_utils": "pythonify_logs",
}
#: By module of ``tensorflow.python``.
TENSORFLOW: Mapping[str, str] = {
    "autograph.core.ag_ctx": "control_status_ctx",
    "autograph.impl.api": "tf_convert",
    "autograph.pyct.loader": "load_source",
    "checkpoint.checkpoint_management": "",
    "checkpoint.functional_saver": "MultiDeviceSaver",
    "checkpoint.tensor_callable": "Callable",
    "distribute.cross_device_ops": "_simple_reduce reduce_non_distributed_value",
    "distribute.distribute_lib": (
        "UpdateContext _get_default_replica_mode _get_default_strategy "
        "_pop_per_thread_mode _push_per_thread_mode"
    ),
    "distribute.distribute_utils": "is_mirrored regroup select_replica",
    "distribute.input_util": (
        "get_distributed_dataset get_distributed_datasets_from_function"
    ),
    "distribute.mirrored_strategy": "MirroredExtended",
    "distribute.values": (
        "DistributedValues MirroredVariable PerReplica SyncOnReadVariable"
    ),
    "distribute.values_util": "get_on_read_restore_ops",
    "eager.context": "context context_safe get_function_def global_seed",
    "eager.core": "_FallbackException",
    "eager.execute": "execute",
    "eager.polymorphic_function.polymorphic_function": "Function",
    "eager.record": "could_possibly_record",
    "framework.auto_control_deps": "register_acd_resource_resolver",
    "framework.auto_control_deps_utils": "get_read_write_resource_inputs",
    "framework.op_def_registry": "get",
    "framework.ops": "get_gradient_function uid",
    "framework.random_seed": "get_seed",
    "ops.control_flow_util": "GraphOrParentsInXlaContext",
    "ops.control_flow_util_v2": (
        "create_new_tf_function get_func_graph maybe_set_lowering_attr"
    ),
    "ops.control_flow_v2_func_graphs": (
        "CondBranchFuncGraph WhileBodyFuncGraph WhileCondFuncGraph"
    ),
    "ops.gen_functional_ops": "_while case stateless_case stateless_while",
    "ops.gen_random_index_shuffle_ops": "",
    "ops.gen_stateless_random_ops": "",
    "ops.handle_data_util": "copy_handle_data get_resource_handle_data",
    "ops.random_ops_util": "get_key_counter_alg",
    "ops.resource_variable_ops": ("BaseResourceVariable UninitializedVariable"),
    "trackable.base": "VARIABLE_VALUE_KEY",
    "util._pywrap_determinism": "enable is_enabled",
}


def check(
    of_keras: Mapping[str, str] = KERAS, of_tensorflow: Mapping[str, str] = TENSORFLOW
) -> None:
    """Compare this Keras and TensorFlow with the tables.

    Raises:
        UsageError: One of them lacks a name.
    """
    for library, version, root, names, newest in (
        ("keras", keras.__version__, "keras.src", of_keras, NEWEST),
        (
            "tensorflow",
            tf.__version__,
            "tensorflow.python",
            of_tensorflow,
            NEWEST_TENSORFLOW,
        ),
    ):
        missing = [*_missing(root, names)]
        if missing:
            raise UsageError(
                f"{library} {version} lacks what collective takes from inside it: "
                + ", ".join(missing),
                hint=f"pip install --upgrade '{library}<={newest}.99'",
            )
    if _number(keras.__version__) > _number(NEWEST):
        log.warning(
            "keras %s is newer than %s, the newest that collective is tested with. HINT: "
            "pip install 'keras<=%s.99' if something fails",
            keras.__version__,
            NEWEST,
            NEWEST,
        )


def _missing(root: str, names: Mapping[str, str]) -> Iterator[str]:
    for place, wanted in names.items():
        module, _, kind = place.partition(":")
        try:
            owner: Any = importlib.import_module(f"{root}.{module}")
            owner = getattr(owner, kind) if kind else owner
        except (ImportError, AttributeError):
            yield f"{root}.{place}"
            continue
        lacks = set(wanted.split()) - set(dir(owner))
        if lacks and kind:  # set by methods, if at all
            lacks -= _used_by(owner)
        yield from (f"{root}.{place}.{n}" for n in wanted.split() if n in lacks)


def _used_by(kind: type[Any]) -> set[str]:
    """Return the attributes that methods of a class read or set."""
    functions = (f for base in kind.__mro__ for f in vars(base).values())
    found: set[str] = set()
    for function in functions:
        function = getattr(function, "fget", function)
        found.update(getattr(getattr(function, "__code__", None), "co_names", ()))
    return found


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


check()
