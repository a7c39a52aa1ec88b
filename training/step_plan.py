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
    """

    gather_loss: bool = False
    gather_metrics: bool = False
    notes: tuple[str, ...] = ()
