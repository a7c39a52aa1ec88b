"""How the step treats what is not a sum over rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """What the check before the first step found.

    Attributes:
        gather_loss: The loss couples rows of a batch: it is computed on the predictions
            of all replicas.
        gather_metrics: As ``gather_loss``, for metrics that are not sums over rows.
        notes: A line each, for the user.
        gather_look_ups: The optimizer sees the gradient of each look-up of a batch in an
            embedding, as in Keras, not their sum over the look-ups of a row.
    """

    gather_loss: bool = False
    gather_metrics: bool = False
    notes: tuple[str, ...] = ()
    gather_look_ups: bool = False
