"""Backends whose processes may place a model's layers over several devices."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

from collective.backends.base import Backend, CoreOptions
from collective.backends.devices import configure, local_devices
from collective.environment import Environment


@dataclass(frozen=True)
class ModelParallelOptions(CoreOptions):
    """Over how many devices a model is placed.

    Attributes:
        model_parallel: Devices of each process over which a model's layers are placed
            (single, native, mpi); where there are fewer GPUs, logical CPU devices.
    """

    model_parallel: int = 1


class ModelParallel(Backend):
    """Gives each process ``Options.model_parallel`` devices, its ``stages``."""

    option_type: ClassVar[type[CoreOptions]] = ModelParallelOptions
    options: ModelParallelOptions

    def _configure_devices(self, environment: Environment) -> None:
        """Sets up this process' devices; a subclass calls it when it has started."""
        count = self.options.model_parallel
        configure(self.options, environment, self.overlaps, count)
        self.stages = local_devices(count) if count > 1 else []

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """With stages, variables are made in host memory; their layers are placed later."""
        if not self.stages:
            return super().scope()
        import tensorflow as tf

        return tf.device("/cpu:0")
