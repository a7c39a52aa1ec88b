"""Everything a user may choose about a backend, in one flat record."""

from __future__ import annotations

from dataclasses import dataclass

from collective.backends.capabilities import ServingOptions
from collective.backends.native import NativeOptions
from collective.backends.tf_mirrored import MirroredOptions
from collective.backends.tf_multiworker import MultiWorkerOptions


@dataclass(frozen=True)
class Options(NativeOptions, MirroredOptions, MultiWorkerOptions, ServingOptions):
    """What a user may choose about a backend: the options of all backends.

    Each field is documented in the class that it comes from:

    - every backend: ``threads`` (``CoreOptions``)
    - in-process backends: ``devices`` (``LocalDevicesOptions``)
    - tf-mirrored: ``cross_device_ops`` (``MirroredOptions``)
    - tf-multiworker: ``communication`` (``MultiWorkerOptions``)
    - tf-parameter-server: ``parameter_servers`` (``ServingOptions``)
    - native, mpi: ``min_np``, ``max_np`` (``ElasticOptions``)
    - native, horovod: ``bucket_bytes`` (``OverlapOptions``)
    - native: ``algorithm``, ``transport_dtype`` (``NativeOptions``),
      ``tensor_parallel`` (``TensorParallelOptions``)
    - single, native, mpi: ``model_parallel`` (``ModelParallelOptions``)

    An option that the chosen backend does not take is refused where it is set.
    """
