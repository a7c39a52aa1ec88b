"""The record of a model is found by the model, and freed with it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from collective.training.model.record import record_of
from tests.training import cases, small

pytestmark = pytest.mark.usefixtures("clean_keras")


def test_a_whole_model_has_an_empty_record(backends_by_name):
    model = small.model()()
    small.train(backends_by_name("single"), model=model, steps=1)
    record = record_of(model)
    assert record.hook is None


def test_the_record_ends_with_its_model(backends_by_name):
    spec = cases.spec_of(cases.labelled(np.random.default_rng(0), 4, 0))
    model = cases.built(cases.mlp(cases.sgd), backends_by_name("single"), spec)
    record = record_of(model)
    assert record.trainable == model.trainable_variables
    del record
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
