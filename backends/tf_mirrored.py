"""One process, several devices: ``tf.distribute.MirroredStrategy``."""

from __future__ import annotations

from typing import Any

from collective.backends.base import Options
from collective.backends.devices import local_devices
from collective.backends.tf_strategy import LocalStrategyBackend
from collective.errors import UsageError


class MirroredBackend(LocalStrategyBackend):
    """A replica on each GPU, or on each of some logical CPU devices.

    ``cross_device_ops`` ``auto`` is NCCL for GPUs and, for CPU devices, reduction to
    one device: TensorFlow's default there takes three to five times as long.
    """

    name = "tf-mirrored"
    summary = "one process, a replica on each local device (MirroredStrategy)"
    own_options = ("devices", "cross_device_ops")

    def _strategy(self, options: Options) -> Any:
        import tensorflow as tf

        devices = local_devices(options.devices)
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
                hint="--cross-device-ops auto",
            )
        if wanted not in kinds:
            raise UsageError(
                f"unknown cross-device ops {wanted!r}",
                hint=f"--cross-device-ops {' | '.join(['auto', *kinds])}",
            )
        return kinds[wanted]()
