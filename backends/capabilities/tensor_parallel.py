"""Backends on which several ranks may hold one replica together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from collective.backends.base import Backend, CoreOptions
from collective.backends.tensor_group import TensorGroup


@dataclass(frozen=True)
class TensorParallelOptions(CoreOptions):
    """How many ranks share a replica.

    Attributes:
        tensor_parallel: Ranks that hold one replica together (native); see
            ``collective.backends.tensor_group``.
    """

    tensor_parallel: int = 1


class TensorParallel(Backend):
    """Groups of ``Options.tensor_parallel`` neighbouring ranks hold a replica each."""

    option_type: ClassVar[type[CoreOptions]] = TensorParallelOptions
    options: TensorParallelOptions
    tensor: TensorGroup | None

    def _share_replicas(self) -> None:
        """Makes the groups; every rank calls it once it is in the job."""
        parts = self.options.tensor_parallel
        if parts == 1:
            return
        self.tensor = TensorGroup(self.rank, self.size, parts, self.require_all_ranks)
        self.replicas = self.size // parts
        self.local_replicas = range(self.rank // parts, self.rank // parts + 1)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Layers made in it are split over the group."""
        return super().scope() if self.tensor is None else self.tensor.for_layers()

    def sum_over_processes(self, tensors: Sequence[Any]) -> list[Any]:
        """As ``all_reduce``, over all processes: also over those of one replica."""
        return self.all_reduce(tensors)
