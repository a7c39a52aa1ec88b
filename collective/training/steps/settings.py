"""What the programs of a training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices
from collective.fit_options import FitOptions
from collective.training.virtual.pieces import VirtualReplicas


@dataclass(frozen=True)
class StepSettings:
    """How the rows of a batch are shared out and the parts are summed.

    Attributes:
        backend: Sums over ranks.
        options: The options of ``collective.fit`` that change a step.
        virtual: The virtual replicas that share a batch, or None.
        attached: While a step is traced, returns more tensors of this process that its
            first sum adds up over the ranks. If None, there are none.
    """

    backend: Backend
    options: FitOptions = field(default_factory=FitOptions)
    virtual: VirtualReplicas | None = None
    attached: Callable[[], list[Any]] | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether a step differs from Keras' own."""
        options = self.options
        return bool(
            self.backend.replicas > 1
            or self.backend.elastic
            or isinstance(self.backend, LocalDevices)
            or self.virtual is not None
            or options.accumulate > 1
            or options.hook is not None
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what a traced program depends on."""
        options = self.options
        return (
            self.backend,
            self.virtual,
            options.accumulate,
            options.hook,
            options.shard_optimizer,
        )
