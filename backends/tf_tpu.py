"""One process, the cores of a TPU: ``tf.distribute.TPUStrategy``.

Sums: TensorFlow, over the TPU's own network.

Sharp bits: never run on a TPU; tested as far as its code goes without one.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from collective.backends.base import Availability
from collective.backends.devices import LocalDevicesOptions
from collective.backends.tf_strategy import LocalStrategyBackend
from collective.environment import Environment
from collective.errors import UsageError

# The driver's files: up to v4, and from v5e on. A virtual machine's GPUs have the latter too.
CHIPS = ("/dev/accel0", "/dev/vfio/0")
HINT = "on a Cloud TPU VM: pip install tensorflow-tpu; elsewhere: export TPU_NAME=..."


class TPUBackend(LocalStrategyBackend):
    """A replica on each core: of this machine's TPU, or of the one in ``TPU_NAME``."""

    name = "tf-tpu"
    summary = "one process, a replica on each TPU core (TPUStrategy); never run on one"
    option_type = LocalDevicesOptions
    options: LocalDevicesOptions

    def _strategy(self) -> Any:
        import tensorflow as tf

        tpu = os.environ.get("TPU_NAME", "local")
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(tpu)
            strategy = tf.distribute.TPUStrategy(resolver)
        except Exception as error:  # TensorFlow's and the network's, of many classes
            first = str(error).strip().split("\n")[0]
            raise UsageError(f"TPU {tpu!r}: {first}", hint=HINT) from error
        cores = strategy.num_replicas_in_sync
        if self.options.devices not in (None, cores):
            raise UsageError(
                f"devices={self.options.devices}: TPU {tpu!r} has {cores} cores",
                hint="leave devices out",
            )
        return strategy

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """From this machine's files; asks no network, which could take a minute."""
        if environment.size > 1:
            return super().availability(environment)
        if "TPU_NAME" in os.environ:
            return Availability(True, f"TPU_NAME is {os.environ['TPU_NAME']}")
        if not any(Path(chip).exists() for chip in CHIPS):
            return Availability(False, "there is no TPU", HINT)
        if importlib.util.find_spec("libtpu") is None:
            return Availability(False, "libtpu is not installed", HINT)
        return Availability(True, "a TPU in this machine")
