"""What the programs of a training share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices
from collective.fit_options import FitOptions


@dataclass(frozen=True)
class StepSettings:
    """How the rows of a batch are shared out and the parts are summed.

    Attributes:
        backend: Sums over ranks.
        options: The options of ``collective.fit`` that change a step.
        attached: While a step is traced, returns more tensors of this process that its
            first sum adds up over the ranks. If None, there are none.
    """

    backend: Backend
    options: FitOptions = field(default_factory=FitOptions)
    attached: Callable[[], list[Any]] | None = None

    @property
    def is_distributed(self) -> bool:
        """Return whether a step differs from Keras' own."""
        options = self.options
        return bool(
            self.backend.replicas > 1
            or self.backend.elastic
            or isinstance(self.backend, LocalDevices)
            or options.accumulate > 1
        )
