"""One process, one device: nothing to sum. The reference for all others."""

from __future__ import annotations

from typing import Any

from collective.backends.base import Availability, Backend, Options
from collective.backends.devices import configure, stages
from collective.environment import Environment
from collective.errors import UsageError


class SingleBackend(Backend):
    """One replica; ``all_reduce`` hands its tensors back."""

    name = "single"
    summary = "one process on one device; the reference"
    one_replica = True
    own_options = ("model_parallel",)

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        if self.size > 1:
            raise UsageError(
                f"backend 'single' is one process, but {self.size} were started: each "
                "would train a model of its own",
                hint="choose another --backend, or start one process: python train.py",
            )
        configure(options, Environment())
        self.stages = stages(options)

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable unless a launcher started several processes."""
        if environment.size > 1:
            return Availability(
                False, f"{environment.size} processes were started", "python train.py"
            )
        return Availability(True, "always")

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        return tensors
