"""Trains with a plan given by hand, and by stock Keras in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from collective.fit_options import FitOptions
from collective.training.assemble import make_evaluation, make_step
from collective.training.input.feed import ENDLESS, PlannedFeed
from collective.training.input.pipeline import Input
from collective.training.loop.loop import Loop
from collective.training.loop.position import Position
from collective.training.prepare import prepare
from collective.training.step.plan import StepPlan
from collective.training.virtual.pieces import VirtualReplicas
from tests import launch
from tests.training.small import on_rank_zero

BATCH, EPOCHS = 10, 3
# The values of the variables, by their paths in their order, and the history.
Outcome = tuple[list[tuple[str, np.ndarray]], dict[str, list]]
NAMES = (os.environ[launch.BACKEND],) if launch.launched() else ("single",)


def planned(
    make: Callable[[], keras.Model],
    data: tuple,
    validation: tuple | None,
    backend: Any,
    plan: StepPlan,
    **options: Any,
) -> Outcome:
    """As ``collective.training.fit`` trains."""
    inputs = Input(data, BATCH, shuffle=False)
    prepared = prepare(make, backend, inputs.spec, micro_batch_rows=BATCH)
    position = Position(prepared.model, backend)
    asked = FitOptions(**options)
    step = make_step(prepared, backend, inputs.spec, asked, plan=plan)
    evaluate = None
    if validation is not None:
        batches = Input(validation, BATCH, shuffle=False)
        evaluate = make_evaluation(prepared, backend, batches, plan=plan)
    count = asked.virtual_replicas
    virtual = None if count is None else VirtualReplicas(count)
    feed = PlannedFeed(inputs, backend, virtual=virtual)
    Loop(position, step, feed, EPOCHS, ENDLESS, (), evaluate).run()
    return outcome(prepared.model, position.history)


def stock(
    make: Callable[[], keras.Model], data: tuple, validation: tuple | None, backend: Any
) -> Outcome:
    """The same by ``keras.Model.fit``."""
    x, y, *weight = data

    def train() -> Outcome:
        model = make()
        history = model.fit(
            x,
            y,
            sample_weight=weight[0] if weight else None,
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            validation_data=validation,
        )
        return outcome(model, history.history)

    return on_rank_zero(backend, train)


def outcome(model: keras.Model, history: dict[str, list]) -> Outcome:
    """All but metrics and the states of generators."""
    variables = [
        (variable.path, np.array(variable))
        for variable in model.variables
        if "metric" not in variable.path and not variable.name.startswith("seed")
    ]
    return variables, history


def assert_same(got: Outcome, wanted: Outcome, tolerance: float) -> None:
    """Every variable and the whole history."""
    (variables, history), (reference, numbers) = got, wanted
    for (_, mine), (path, other) in zip(variables, reference, strict=True):
        np.testing.assert_allclose(
            mine, other, rtol=tolerance, atol=tolerance, err_msg=path
        )
    assert sorted(history) == sorted(numbers)
    for name, values in numbers.items():
        np.testing.assert_allclose(
            history[name], values, rtol=tolerance, atol=tolerance, err_msg=name
        )
