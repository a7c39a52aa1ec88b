"""What the programs of a training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices
from collective.fit_options import FitOptions
from collective.training.compression import named
from collective.training.compression.hook import CommunicationHook
from collective.training.virtual.pieces import VirtualReplicas


@dataclass(frozen=True)
class StepSettings:
    """How the rows of a batch are shared out and the parts are summed.

    Attributes:
        backend: Sums over ranks.
        options: The options of ``collective.fit`` that change a step.
        attached: While a step is traced, returns more tensors of this process that its
            first sum adds up over the ranks. If None, there are none.
        reports: Whether each training step also returns its report, for observers; see
            ``collective.training.steps.report``.
        is_kept: Whether steps are repeated or recorded.
    """

    backend: Backend
    options: FitOptions = field(default_factory=FitOptions)
    attached: Callable[[], list[Any]] | None = None
    reports: bool = False
    is_kept: bool = False

    @property
    def virtual(self) -> VirtualReplicas | None:
        """Return the virtual replicas that share a batch, or None for the real ones."""
        count = self.options.virtual_replicas
        return None if count is None else VirtualReplicas(count)

    @property
    def hook(self) -> CommunicationHook | None:
        """Return what compresses gradients, or None if they are summed as they are.

        Raises:
            UsageError: There is no hook of this name.
        """
        return None if self.options.hook is None else named.make(self.options.hook)

    @property
    def is_distributed(self) -> bool:
        """Return whether a step differs from Keras' own."""
        options = self.options
        return bool(
            self.backend.replicas > 1
            or self.is_kept
            or not self.backend.synchronous
            or isinstance(self.backend, LocalDevices)
            or options.accumulate > 1
            or options.virtual_replicas is not None
            or options.hook is not None
            or self.reports
        )
