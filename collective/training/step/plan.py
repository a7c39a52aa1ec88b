"""How the step treats what is not a sum over rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """How the step computes what is not a sum over rows, and what travels in which form.

    The check before the first step finds all but the last two.

    Attributes:
        gather_loss: The loss couples rows of a batch: it is computed on the predictions
            of all replicas.
        gather_metrics: As ``gather_loss``, for metrics that are not sums over rows.
        notes: A line each, for the user.
        look_ups: For trainable variables, by index, whose gradients are look-ups in an
            embedding: how many a row of the batch has, rounded up.
        as_rows: Indices of those whose look-ups travel one by one, and are added up
            after the exchange: fewer bytes than the whole table.
        gather_look_ups: The optimizer sees the gradient of each look-up of a batch in an
            embedding, as in Keras, not their sum over the look-ups of a row.
    """

    gather_loss: bool = False
    gather_metrics: bool = False
    notes: tuple[str, ...] = ()
    look_ups: tuple[tuple[int, int], ...] = ()
    as_rows: tuple[int, ...] = ()
    gather_look_ups: bool = False
