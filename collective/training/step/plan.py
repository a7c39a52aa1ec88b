"""How the step treats what is not a sum over rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """How the step computes what is not a sum over rows, and what travels in which form.

    The check before the first step finds all but ``as_rows`` and ``gather_look_ups``.
    """

    # The loss couples rows of a batch: it is computed on the predictions of all
    # replicas.
    gather_loss: bool = False
    # As ``gather_loss``, for metrics that are not sums over rows.
    gather_metrics: bool = False
    notes: tuple[str, ...] = ()  # a line each, for the user
    # For trainable variables, by index, whose gradients are look-ups in an embedding:
    # how many a row of the batch has, rounded up.
    look_ups: tuple[tuple[int, int], ...] = ()
    # Indices of those whose look-ups travel one by one, and are added up after the
    # exchange: fewer bytes than the whole table.
    as_rows: tuple[int, ...] = ()
    # Places of the values of ``add_loss`` that are sums over rows, among all of them;
    # the others are means.
    added_sums: tuple[int, ...] = ()
    # Places of layers, among ``model._flatten_layers()``, that couple the rows of a
    # batch: they are computed on the rows of all replicas.
    whole_layers: tuple[int, ...] = ()
    # The optimizer sees the gradient of each look-up of a batch in an embedding, as in
    # Keras, not their sum over the look-ups of a row.
    gather_look_ups: bool = False
