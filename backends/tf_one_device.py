"""One process, one device: ``tf.distribute.OneDeviceStrategy``. Nothing to sum."""

from __future__ import annotations

from typing import Any

from collective.backends.devices import gpus
from collective.backends.tf_strategy import LocalStrategyBackend


class OneDeviceBackend(LocalStrategyBackend):
    """As ``single``, within a strategy: on the first GPU, or the CPU."""

    name = "tf-one-device"
    summary = "one process on one device, within a strategy (OneDeviceStrategy)"

    def _strategy(self) -> Any:
        import tensorflow as tf

        found = tf.config.list_physical_devices("GPU")
        return tf.distribute.OneDeviceStrategy("/gpu:0" if found else "/cpu:0")

    @classmethod
    def _found(cls) -> str:
        return "a GPU" if gpus() else "the CPU"
