"""Backends with ranks that serve the chief instead of running the training's code."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from collective.backends.base import Backend, CoreOptions


@dataclass(frozen=True)
class ServingOptions(CoreOptions):
    """Which ranks hold the variables.

    Attributes:
        parameter_servers: Ranks that hold variables (tf-parameter-server). None: one.
    """

    parameter_servers: int | None = None


class Serving(Backend):
    """Asynchronous: rank 0 hands batches to workers and waits for none of them.

    Attributes:
        workers: Number of ranks that compute gradients.
    """

    option_type: ClassVar[type[CoreOptions]] = ServingOptions
    synchronous = False
    options: ServingOptions
    workers: int

    @abstractmethod
    def serve(self) -> None:
        """On every rank but the chief, serves until the job ends, then ends the process."""
