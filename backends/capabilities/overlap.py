"""Backends that sum the first gradients while the last are still computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collective.backends.base import Backend, CoreOptions
from collective.buckets import BYTES_BETWEEN_HOSTS
from collective.environment import Environment


@dataclass(frozen=True)
class OverlapOptions(CoreOptions):
    """In which pieces gradients travel.

    Attributes:
        bucket_bytes: Sums the gradients in buckets of about so many bytes, the first
            while the rest is computed (native, horovod). By default buckets of 4 MiB
            between hosts, and one for all on one host.
    """

    bucket_bytes: int | None = None


class Overlap(Backend):
    """Sums gradients in buckets, each as soon as back-propagation has made it.

    Attributes:
        bucket_bytes: The size of a bucket; None: one bucket, after all gradients.
    """

    option_type: ClassVar[type[CoreOptions]] = OverlapOptions
    options: OverlapOptions

    def __init__(self, options: OverlapOptions, environment: Environment | None = None):
        super().__init__(options, environment)
        self.bucket_bytes = options.bucket_bytes
        if self.bucket_bytes is None and self.size != self.local_size:
            self.bucket_bytes = BYTES_BETWEEN_HOSTS
        self.overlaps = self.bucket_bytes is not None
