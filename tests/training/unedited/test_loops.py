"""The messages about a script's own loops, with ``--loops`` and without."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training.unedited import notice
from collective.training.unedited.notice import warn_of_gradients, warn_of_updates
from collective.training.unedited.script_job import ScriptJob
from tests.training.unedited.test_unedited import Ranks


@pytest.fixture
def job():
    found = ScriptJob(Ranks(0, []))
    yield found
    found.undo()


def update(optimizer):
    optimizer.apply([tf.ones([2])], [keras.Variable(np.ones(2, "float32"))])


def test_the_first_update_of_a_loop_is_reported(job, capsys, monkeypatch):
    monkeypatch.setattr(notice, "_DROP_INS", ())  # other tests here import one
    warn_of_updates(job)
    with job.calling("Model.fit") if job.backend.size == 1 else _inside(job):
        update(keras.optimizers.SGD())
    assert capsys.readouterr().err == ""
    update(keras.optimizers.SGD())
    update(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    printed = capsys.readouterr().err
    assert printed.count("is not distributed: each of the 2 processes") == 1
    for way in ("--loops", "collective.distribute.Strategy", "DistributedGradientTape"):
        assert way in printed


def test_each_loop_that_runs_whole_is_reported_by_its_place(job, capsys, monkeypatch):
    monkeypatch.setattr(notice, "_DROP_INS", ())
    weight, optimizer = keras.Variable(np.ones(2, "float32")), keras.optimizers.SGD()
    warn_of_updates(job)
    for _ in range(2):
        optimizer.apply([tf.ones([2])], [weight])
    optimizer.apply([tf.ones([2])], [weight])
    printed = capsys.readouterr().err
    assert printed.count("the training loop at test_loops.py:") == 2


def test_gradients_outside_of_a_step_are_reported(job, capsys, monkeypatch):
    monkeypatch.setattr(notice, "_DROP_INS", ())
    weight, inputs = tf.Variable([1.0, 2.0]), tf.ones([2])
    warn_of_gradients(job)

    def gradient(sources):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(weight * inputs)
        return tape.gradient(loss, sources)

    gradient([inputs])  # without a model
    with _inside(job):
        gradient([weight])
    assert capsys.readouterr().err == ""
    for _ in range(2):
        gradient([weight])
    printed = capsys.readouterr().err
    assert printed.count("the training step at test_loops.py:") == 1
    assert (
        "is not distributed: each of the 2 processes computes its gradients" in printed
    )


class _inside:
    """Stands for the inside of one of our functions."""

    def __init__(self, job):
        self.job = job

    def __enter__(self):
        self.job._depth += 1

    def __exit__(self, *_):
        self.job._depth -= 1
