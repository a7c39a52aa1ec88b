"""What the user gave to ``compile``, as it was given."""

from __future__ import annotations

from typing import Any

import keras


def compiled_arguments(model: keras.Model) -> dict[str, Any]:
    """Losses, metrics and their weights, by the names of ``compile``'s arguments."""
    losses, metrics = model._compile_loss, model._compile_metrics
    return {
        "loss": model.loss,
        "loss_weights": getattr(losses, "_user_loss_weights", None),
        "metrics": getattr(metrics, "_user_metrics", None),
        "weighted_metrics": getattr(metrics, "_user_weighted_metrics", None),
    }
