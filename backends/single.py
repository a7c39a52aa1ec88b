"""One process, one device: nothing to sum. The reference that every backend must equal.

It is the shortest backend, and so the one to copy for a new backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.backends.base import OneProcessBackend
from collective.backends.capabilities import OneDevice, ShardCollectives
from collective.backends.options import Options
from collective.environment import Environment

if TYPE_CHECKING:
    import tensorflow as tf


class SingleBackend(OneProcessBackend, OneDevice, ShardCollectives):
    """One replica; ``all_reduce`` returns its tensors."""

    name = "single"
    summary = "one process on one device; the reference"
    one_replica = True

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        self._configure_devices(Environment())

    def _all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tensors
