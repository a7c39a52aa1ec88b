"""Models that were made in the scope of one of our strategies."""

from __future__ import annotations

from typing import Any

import keras


def strategy_of(model: Any) -> Any:
    """The strategy of ours in whose scope a model was made; None if there is none."""
    strategy = getattr(model, "distribute_strategy", None)
    ours = isinstance(model, keras.Model) and hasattr(strategy, "fit_backend")
    return strategy if ours else None
