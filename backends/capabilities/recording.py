"""Backends that report when each collective of a step ran."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from collective.backends.base import Backend


@dataclass(frozen=True)
class Collective:
    """A collective that this process ran.

    Attributes:
        begin, end: When, in seconds of ``time.perf_counter``.
        bytes: Size of its tensors together.
    """

    begin: float
    end: float
    bytes: int


class Recording(Backend):
    """Records collectives while it is switched on."""

    @abstractmethod
    def record(self, on: bool) -> None:
        """Starts or stops recording this process' collectives."""

    @abstractmethod
    def recorded(self) -> list[Collective]:
        """The collectives recorded since the last call, in order; may be none."""
