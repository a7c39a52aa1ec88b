"""Steps found in source, and what is printed for a script without ``--loops``."""

from __future__ import annotations

import ast
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training.unedited.job import Job
from collective.training.unedited.loops import notice, segments
from collective.training.unedited.loops.functions import find_step
from collective.training.unedited.loops.notice import warn_of_gradients, warn_of_updates
from tests.training.unedited.test_unedited import Ranks

X = np.ones((6, 3), "float32")


@pytest.fixture
def job():
    found = Job(Ranks(0, []))
    yield found
    found.undo()


def in_line(function):
    """A program whose steps do what they would do without being functions."""
    source = inspect.cleandoc(inspect.getdoc(function))
    tree, steps = ast.parse(source), []
    segments.rewrite(tree, "program.py", steps)
    calls = []

    def run(number, step, names):
        calls.append(steps[number])
        code = step.__code__
        read = code.co_varnames[: code.co_argcount]
        found = step(**{name: names[name] for name in read if name in names})
        return tuple(found.get(n, names.get(n)) for n in steps[number].results)

    ours = {"tf": tf, segments.RUN: run}
    exec(compile(tree, "program.py", "exec"), ours)
    stock = {"tf": tf}
    exec(source, stock)
    for name, value in stock.items():
        if isinstance(value, float):
            assert ours[name] == value, name
    return steps, calls


def module():
    """
    w = tf.Variable([2.0, 3.0])
    seen = 0.0
    for x in [tf.ones([4, 2]), 2 * tf.ones([3, 2])]:
        x = x + 1
        with tf.GradientTape() as tape:
            made = x * w
            loss = tf.reduce_mean(made)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * gradient)
        seen += float(loss)
    last = float(tf.reduce_sum(w))
    """


def functions():
    """
    w = tf.Variable([2.0, 3.0])
    def gradients(x, weight=1.0):
        with tf.GradientTape(persistent=True) as tape:
            x = x * weight
            loss = tf.reduce_mean(x * w)
            other = tf.reduce_sum([v * v for v in tf.unstack(w)])
        one = tape.gradient(loss, w)
        two = tape.gradient(other, w)
        del tape
        return loss, one + two
    class Trainer:
        def step(self, x):
            with tf.GradientTape() as one, tf.GradientTape() as two:
                loss = tf.reduce_mean(x * w)
            return one.gradient(loss, w) + two.gradient(loss, w)
    a, b = gradients(tf.ones([4, 2]), 3.0)
    c = Trainer().step(tf.ones([5, 2]))
    a, b, c = (float(tf.reduce_sum(v)) for v in (a, b, c))
    """


def left_alone():
    """
    w = tf.Variable([2.0, 3.0])
    kept = {}
    for x in [tf.ones([4, 2])]:
        with tf.GradientTape() as tape:
            kept["loss"] = tf.reduce_mean(x * w)
        g = tape.gradient(kept["loss"], w)
    with tf.GradientTape() as tape:
        pass
    a = float(tf.reduce_sum(g))
    """


def test_steps_of_a_module_are_functions():
    steps, calls = in_line(module)
    assert [s.place for s in steps] == ["program.py:5"] and len(calls) == 2
    # made is read inside only; x is among what may be rows, and w is one of its names.
    assert steps[0].results == ["gradient", "loss"]
    assert {"x", "w"} <= steps[0].taped and "made" not in steps[0].taped


def test_steps_of_functions_and_methods():
    steps, calls = in_line(functions)
    assert len(steps) == len(calls) == 2
    assert "weight" in steps[0].taped and "x" in steps[0].taped


def test_what_writes_elements_is_left_alone():
    assert in_line(left_alone) == ([], [])


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

    gradient([inputs])  # of no model
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


def test_functions_that_are_steps(job, capsys):
    """Those that take gradients of a model's, and have rows; not those that apply them."""
    weight, optimizer = keras.Variable(np.ones(3, "float32")), keras.optimizers.SGD()
    optimizer.build([weight])
    rows = tf.constant(X)

    def loss(x):
        return tf.reduce_mean(x * weight)

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            value = loss(x)
        return tape.gradient(value, [weight])

    @tf.function
    def of_inputs(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        return tape.gradient(value, x)

    @tf.function
    def of_all_rows():
        with tf.GradientTape() as tape:
            value = loss(rows)
        return tape.gradient(value, [weight])

    @tf.function
    def update(given):
        optimizer.apply([given], [weight])

    def is_step(function, *args):
        return find_step(job, function, args, {}) is not None

    assert is_step(gradients, rows)
    assert not is_step(of_inputs, rows)
    assert not is_step(update, tf.ones([3]))
    assert capsys.readouterr().err == ""
    assert not is_step(of_all_rows)
    assert "of_all_rows() is not distributed" in capsys.readouterr().err


class _inside:
    """As within one of our functions."""

    def __init__(self, job):
        self.job = job

    def __enter__(self):
        self.job._depth += 1

    def __exit__(self, *_):
        self.job._depth -= 1
