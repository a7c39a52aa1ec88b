"""How callers say what all ranks do together, without knowing what repeats it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Unit(Protocol):
    """Runs what all ranks do together."""

    def __call__(
        self, attempt: Callable[[], Any], variables: Sequence[tf.Variable] = (), /
    ) -> Any:
        """Run an attempt, which makes some variables equal on every rank."""
        ...


def at_once(
    attempt: Callable[[], Any], variables: Sequence[tf.Variable] = (), /
) -> Any:
    """Run an attempt; no rank leaves the job."""
    return attempt()
