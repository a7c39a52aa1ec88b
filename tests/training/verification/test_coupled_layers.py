"""Layers that couple rows are found, and computed whole; one process, pieces as replicas."""

from __future__ import annotations

import keras
import pytest
from keras import ops

from collective.training.step.plan import StepPlan
from collective.training.verification.differences import left_out
from tests.training.verification.checked import (
    Center,
    Contrast,
    Penalty,
    State,
    network,
    verified,
)

pytestmark = pytest.mark.usefixtures("clean_keras", "own_cache")


def test_a_layer_that_couples_rows_is_computed_whole():
    for layer in (
        Contrast(name="own"),
        Center(name="own"),
        State(lambda old, x: ops.maximum(old - 9, ops.max(x)), name="own"),
        State(lambda old, x: old + ops.sum(x), name="own"),
    ):
        model = network(layer, keras.layers.ReLU())
        plan = verified(model)
        (place,) = plan.whole_layers
        assert list(model._flatten_layers())[place] is layer
        assert plan.notes == (
            "layer 'own' couples the rows of a batch: it is computed on the rows of all "
            "replicas, on each of them, each step",
        )
        assert verified(model, pieces=1) == StepPlan()


def test_only_the_layers_that_couple_rows_are_computed_whole():
    model = network(Penalty(ops.mean), Center(), Penalty(ops.mean), Center())
    layers = list(model._flatten_layers())
    chosen = [type(layers[place]) for place in verified(model).whole_layers]
    assert chosen == [Center, Center]


def test_numbers_of_compute_metrics_that_no_metric_has_are_named():
    model = keras.Sequential(name="own")
    (line,) = left_out(model, {"loss": 1.0, "twice": 2.0}, {"loss": 1.0})
    assert "'own' returns 'twice'" in line and "whole_batch=True" in line
    assert left_out(model, {"loss": 1.0}, {"loss": 1.0, "mae": 2.0}) == []
