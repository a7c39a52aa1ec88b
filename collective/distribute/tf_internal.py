"""All names that this folder takes from inside TensorFlow.

``tf.distribute`` documents no way to add a strategy. A subclass of ``MirroredExtended``
needs these names; they are the same in TensorFlow 2.16 to 2.21.
``collective_all_reduce_strategy`` is left out on purpose: it changes with each release.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx
from tensorflow.python.autograph.impl.api import tf_convert
from tensorflow.python.checkpoint.tensor_callable import Callable as CheckpointTensor
from tensorflow.python.distribute.cross_device_ops import (
    _simple_reduce as reduce_local_values,
)
from tensorflow.python.distribute.cross_device_ops import (
    reduce_non_distributed_value,
)
from tensorflow.python.distribute.distribute_utils import (
    is_mirrored,
    regroup,
    select_replica,
)
from tensorflow.python.distribute.input_util import (
    get_distributed_dataset,
    get_distributed_datasets_from_function,
)
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import (
    DistributedValues,
    MirroredVariable,
    PerReplica,
    SyncOnReadVariable,
)
from tensorflow.python.distribute.values_util import (
    get_on_read_restore_ops as restore_each,
)
from tensorflow.python.eager.context import global_seed as _global_seed
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (
    Function,
)
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY

# fmt: off
__all__ = [
    "VARIABLE_VALUE_KEY",
    "CheckpointTensor",
    "DistributedValues",
    "Function",
    "GraphOrParentsInXlaContext",
    "MirroredExtended",
    "MirroredVariable",
    "PerReplica",
    "SyncOnReadVariable",
    "control_status_ctx",
    "copy_function",
    "get_distributed_dataset",
    "get_distributed_datasets_from_function",
    "inputs_of",
    "is_compiled_by_xla",
    "is_mirrored",
    "is_stateless_map",
    "is_unseeded_shuffle",
    "kind_of",
    "map_function",
    "reduce_local_values",
    "reduce_non_distributed_value",
    "regroup",
    "restore_each",
    "select_replica",
    "tensorflow_seed",
    "tf_convert",
]
# fmt: on


def tensorflow_seed() -> int | None:
    """Return the seed of ``tf.random.set_seed``; None if it was not called."""
    return _global_seed()


def is_compiled_by_xla() -> bool:
    """Return whether the graph that is being traced is inside ``jit_compile=True``."""
    return not tf.executing_eagerly() and GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def copy_function(function: Function, python_function: object) -> Function:
    """Return a ``tf.function`` with the same options for another Python function."""
    return function._clone(python_function=python_function)


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Return the data sets that a data set reads."""
    return list(dataset._inputs())


def kind_of(dataset: tf.data.Dataset) -> str:
    """Return the kind of a data set: ``Map``, ``Batch``, ``TensorSlice``, ...

    Parallel variants have the name of the plain one.
    """
    name = type(dataset).__name__.strip("_")
    for word in ("Parallel", "DatasetV1Adapter", "DatasetV2", "Dataset"):
        name = name.replace(word, "")
    return name


def is_unseeded_shuffle(dataset: tf.data.Dataset) -> bool:
    """Return whether a data set shuffles in another order in each process."""
    if kind_of(dataset) != "Shuffle":
        return False
    seeds = (tf.get_static_value(s) for s in (dataset._seed, dataset._seed2))
    return all(seed == 0 for seed in seeds)


def map_function(dataset: tf.data.Dataset) -> tuple[object, object, object]:
    """Return a ``Map``'s Python function, number of parallel calls, and order."""
    parallel = getattr(dataset, "_num_parallel_calls", None)
    order = getattr(dataset, "_deterministic", "default")
    return (
        dataset._map_func._func,
        parallel,
        {"true": True, "false": False}.get(order),
    )


def is_stateless_map(dataset: tf.data.Dataset) -> bool:
    """Return whether a ``Map``'s function is free of random numbers and effects."""
    graph = dataset._map_func.function.graph
    return not any(op._is_stateful for op in graph.get_operations())
