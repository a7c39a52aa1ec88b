"""One process, one device: nothing to sum. The reference that every backend must equal.

The shortest backend, and so the one to copy when you write another.
"""

from __future__ import annotations

from typing import Any

from collective.backends.base import Availability
from collective.backends.capabilities import (
    ModelParallel,
    ModelParallelOptions,
    ShardCollectives,
)
from collective.backends.hints import python
from collective.environment import Environment
from collective.errors import UsageError


class SingleBackend(ModelParallel, ShardCollectives):
    """One replica; ``all_reduce`` returns its tensors."""

    name = "single"
    summary = "one process on one device; the reference"

    def __init__(
        self, options: ModelParallelOptions, environment: Environment | None = None
    ):
        super().__init__(options, environment)
        if self.size > 1:
            raise UsageError(
                f"backend 'single' is one process, but {self.size} were started: each "
                "would train a model of its own",
                hint=f"another backend, or one process: {python()}",
            )
        self._configure_devices(Environment())

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable unless a launcher started several processes."""
        if environment.size > 1:
            return Availability(
                False, f"{environment.size} processes were started", python()
            )
        return Availability(True, "always")

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        return tensors
