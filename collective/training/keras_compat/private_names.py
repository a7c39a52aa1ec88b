"""The names inside Keras that this room takes: one table, checked at import.

A Keras that lacks one, or is newer than the newest that the tests have run with, is named
before anything trains.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from collective.errors import UsageError
from collective.log import log

#: The newest Keras that the tests have run with.
NEWEST = "3.15"

#: By module of ``keras.src``, or class in it (``module:class``): names, space-separated. Those of
#: a class may be methods, or attributes that its methods set.
NAMES: Mapping[str, str] = {
    "api_export": "REGISTERED_OBJS_TO_NAMES get_name_from_symbol",
    "backend": "random",
    "backend.common.global_state": "get_global_attribute",
    "backend.common.masking": "get_keras_mask set_keras_mask",
    "backend.common.stateless_scope:StatelessScope": "losses state_mapping add_update",
    "backend.common.variables:Variable": (
        "_value _shape _dtype _path _initialize _direct_assign"
    ),
    "backend.tensorflow.optimizer:TFOptimizer": "_all_reduce_sum_gradients",
    "backend.tensorflow.trainer": "TFEpochIterator",
    "backend.tensorflow.trainer:TensorFlowTrainer": (
        "distribute_strategy make_train_function"
    ),
    "distribution.distribution_lib": "Distribution",
    "layers.layer:Layer": "_flatten_layers _losses _metrics _call_has_training_arg",
    "layers.normalization.batch_normalization:BatchNormalization": (
        "_moments synchronized"
    ),
    "metrics.reduction_metrics": "Mean Sum",
    "models.functional:Functional": "call",
    "ops.function:Function": "_run_through_graph _nodes_by_depth _outputs_struct",
    "optimizers.base_optimizer:BaseOptimizer": (
        "apply _backend_apply_gradients _clip_gradients _trainable_variables "
        "add_variable_from_reference"
    ),
    "optimizers.loss_scale_optimizer:LossScaleOptimizer": "check_finite",
    "random.seed_generator": "global_seed_generator",
    "random.seed_generator:SeedGenerator": "next",
    "saving.saving_lib": "H5IOStore _save_state get_attr_skipset",
    "trainers.data_adapters": "get_data_adapter",
    "trainers.data_adapters.array_data_adapter": "ArrayDataAdapter",
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
}


def check(names: Mapping[str, str] = NAMES) -> None:
    """Compares this Keras with the table; a UsageError where it lacks a name."""
    missing = [*_missing(names)]
    if missing:
        raise UsageError(
            f"keras {keras.__version__} lacks what collective takes from inside it: "
            + ", ".join(missing),
            hint=f"pip install --upgrade 'keras<={NEWEST}.99'",
        )
    if _number(keras.__version__) > _number(NEWEST):
        log.warning(
            "keras %s is newer than %s, the newest that collective is tested with. HINT: "
            "pip install 'keras<=%s.99' if something fails",
            keras.__version__,
            NEWEST,
            NEWEST,
        )


def _missing(names: Mapping[str, str]) -> Iterator[str]:
    for place, wanted in names.items():
        module, _, kind = place.partition(":")
        try:
            owner: Any = importlib.import_module(f"keras.src.{module}")
            owner = getattr(owner, kind) if kind else owner
        except (ImportError, AttributeError):
            yield f"keras.src.{place}"
            continue
        lacks = set(wanted.split()) - set(dir(owner))
        if lacks and kind:  # set by methods, if at all
            lacks -= _used_by(owner)
        yield from (f"keras.src.{place}.{n}" for n in wanted.split() if n in lacks)


def _used_by(kind: type[Any]) -> set[str]:
    """The attributes that methods of a class read or set."""
    functions = (f for base in kind.__mro__ for f in vars(base).values())
    found: set[str] = set()
    for function in functions:
        function = getattr(function, "fget", function)
        found.update(getattr(getattr(function, "__code__", None), "co_names", ()))
    return found


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


check()
