"""Models that were made in the scope of one of our strategies."""

from __future__ import annotations

from typing import Any

import keras

from collective.backends.base import Backend


def strategy_of(model: Any) -> Any:
    """The strategy of ours in whose scope a model was made; None if there is none."""
    strategy = getattr(model, "distribute_strategy", None)
    ours = isinstance(model, keras.Model) and hasattr(strategy, "fit_backend")
    return strategy if ours else None


def backend_for(model: Any, backend: str | Backend) -> str | Backend:
    """The backend that trains a model: that of its strategy, else the one given.

    Makes variables that replicas have written the same on all; every rank calls it.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return backend
    strategy.extended.average_written()
    return strategy.fit_backend
