"""What some backends can do and others cannot: one class each, with its own options.

A backend inherits from those that it has, and callers ask ``isinstance(backend,
Elastic)``, or read the attribute that the class sets (``backend.overlaps``).

    class                   options                 backends
    Elastic                 min_np, max_np          native, mpi
    Overlap                 bucket_bytes            native, horovod
    TensorParallel          tensor_parallel         native
    ModelParallel           model_parallel          single, native, mpi
    ShardCollectives        none                    single, native, mpi, horovod, tf-multiworker
    Recording               none                    native
    Serving                 parameter_servers       tf-parameter-server

An option given to a backend without the class is an error before anything starts
(``collective.backends.registry``); a value that cannot work is refused by the class'
own ``check_options``.
"""

from collective.backends.capabilities.elastic import Elastic, ElasticOptions
from collective.backends.capabilities.model_parallel import (
    ModelParallel,
    ModelParallelOptions,
)
from collective.backends.capabilities.overlap import Overlap, OverlapOptions
from collective.backends.capabilities.recording import Collective, Recording
from collective.backends.capabilities.serving import Serving, ServingOptions
from collective.backends.capabilities.shard_collectives import ShardCollectives
from collective.backends.capabilities.tensor_parallel import (
    TensorParallel,
    TensorParallelOptions,
)

__all__ = [
    "Collective",
    "Elastic",
    "ElasticOptions",
    "ModelParallel",
    "ModelParallelOptions",
    "Overlap",
    "OverlapOptions",
    "Recording",
    "Serving",
    "ServingOptions",
    "ShardCollectives",
    "TensorParallel",
    "TensorParallelOptions",
]
