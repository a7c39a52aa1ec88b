"""What of a training needs collectives inside the forward pass."""

from __future__ import annotations

import keras

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.step.plan import StepPlan


def features(
    model: keras.Model,
    backend: Backend,
    plan: StepPlan,
    sync_batch_norm: bool,
    cut: bool = False,
) -> set[str]:
    """What of a training needs collectives in the forward pass.

    Args:
        cut: Whether one replica computes its rows in several pieces.
    """
    # The statistics of one replica's rows are those of the batch.
    whole = backend.replicas == 1 and not backend.elastic and not cut
    needs = {
        "coupled": plan.gather_loss or plan.gather_metrics or bool(plan.whole_layers),
        "whole_layers": bool(plan.whole_layers),
        "look_ups": plan.gather_look_ups or bool(plan.as_rows),
        "sync_batch_norm": not whole
        and any(
            sync_batch_norm or layer.synchronized
            for layer in keras_compat.batch_norm_layers(model)
        ),
    }
    return {name for name, needed in needs.items() if needed}
