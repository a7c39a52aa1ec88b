"""One process, several devices: ``tf.distribute.MirroredStrategy``.

Sums: TensorFlow's ``CrossDeviceOps``; between GPUs NCCL.

Sharp bits: the model must be made in ``backend.scope()``. All replicas share one Python
process, and TensorFlow's devices cannot be set up once it has started.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from collective.backends.devices import LocalDevicesOptions, local_devices
from collective.backends.tf_strategy import LocalStrategyBackend
from collective.errors import UsageError


@dataclass(frozen=True)
class MirroredOptions(LocalDevicesOptions):
    """What ``tf-mirrored`` takes.

    Attributes:
        cross_device_ops: ``auto``, ``nccl``, ``hierarchical-copy`` or
            ``reduction-to-one-device`` (tf-mirrored).
    """

    cross_device_ops: str = "auto"


class MirroredBackend(LocalStrategyBackend):
    """A replica on each GPU, or on each of some logical CPU devices.

    ``cross_device_ops`` ``auto`` is NCCL for GPUs and, for CPU devices, reduction to
    one device: TensorFlow's default there takes three to five times as long.
    """

    name = "tf-mirrored"
    summary = "one process, a replica on each local device (MirroredStrategy)"
    option_type = MirroredOptions
    options: MirroredOptions

    def _strategy(self) -> Any:
        import tensorflow as tf

        devices = local_devices(self.options.devices)
        return tf.distribute.MirroredStrategy(
            devices, cross_device_ops=self._cross_device_ops(devices)
        )

    def _cross_device_ops(self, devices: list[str]) -> Any:
        import tensorflow as tf

        on_gpu = devices[0].startswith("/gpu")
        kinds = {
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical-copy": tf.distribute.HierarchicalCopyAllReduce,
            "reduction-to-one-device": tf.distribute.ReductionToOneDevice,
        }
        wanted = self.options.cross_device_ops
        if wanted == "auto":
            wanted = "nccl" if on_gpu else "reduction-to-one-device"
        if wanted == "nccl" and not on_gpu:
            raise UsageError(
                "NCCL needs GPUs, and the devices here are CPUs",
                hint="cross_device_ops='auto'",
            )
        if wanted not in kinds:
            raise UsageError(
                f"unknown cross-device ops {wanted!r}",
                hint=f"cross_device_ops: {' | '.join(['auto', *kinds])}",
            )
        return kinds[wanted]()
