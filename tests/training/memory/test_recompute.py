"""Activations computed again: the same model comes out, and less is kept.

``test_on_ranks`` starts this file on the ranks of a backend, by make test-equivalence.
"""

from __future__ import annotations

import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from collective.fit_options import FitOptions
from collective.training.assemble import make_step
from collective.training.prepared import get_prepared
from collective.training.variants.memory.recompute import cuts
from tests import launch
from tests.training import cases
from tests.training.cases import CASES, built, differences, own_part, spec_of, train

pytestmark = pytest.mark.usefixtures("clean_keras")
RECOMPUTE = FitOptions(recompute=True)
HERE = "tests/training/memory/test_recompute.py"


def dropped_everywhere():
    """Random numbers with a seed of their own and without; a model in a model."""

    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + 0.1 * keras.random.normal(keras.ops.shape(x), dtype=x.dtype)

    inner = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.BatchNormalization(momentum=0.9, epsilon=0.1),
            keras.layers.Dropout(0.3),
            Noise(),
        ]
    )
    inputs = keras.Input((cases.FEATURES,))
    x = keras.layers.Dense(16, activation="tanh")(inputs)
    for _ in range(3):
        y = keras.layers.Dense(16, activity_regularizer="l2")(cases.AddsLoss()(x))
        x = keras.layers.add([keras.layers.Dropout(0.2)(y), x])
    outputs = keras.layers.Dense(cases.CLASSES)(Noise()(inner(x)))
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True)
    return cases.compiled(keras.Model(inputs, outputs), optimizer)


class ByHand(keras.Model):
    """Calls its layers, and a model among them, in Python."""

    def __init__(self):
        super().__init__()
        self.inner = cases.Subclassed()
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.3)
        self.out = keras.layers.Dense(cases.CLASSES)

    def call(self, x, training=False):
        return self.out(self.drop(self.norm(self.inner(x)), training=training))


ALSO = (
    cases.Case("everything", dropped_everywhere, accumulate=3, replicas_matter=True),
    cases.Case(
        "by-hand",
        lambda: cases.compiled(ByHand(), cases.adam()),
        replicas_matter=True,
    ),
)
NAMES = ("masked", "regularised", "two-inputs-two-outputs", "jit")
CHOSEN = [*(c for c in CASES if c.name in NAMES), *ALSO]
ON_RANKS = [*CHOSEN, *(c for c in CASES if c.name in ("clipnorm", "empty-replica"))]

if launch.launched():

    @pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: case.name)
    def test_trains_what_one_process_trains(case, backends_by_name, reference):
        backend = backends_by_name(os.environ[launch.BACKEND])
        wanted = reference(case, "float64", backend.replicas)
        got = train(case, backend, "float64", recompute=True)
        assert differences(got, wanted, "float64") == []


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["native", "mpi", "tf-multiworker"])
def test_on_ranks(name, ranks, reference):
    pytest.importorskip("mpi4py")
    for case in ON_RANKS:
        reference(case, "float64", ranks)
    chosen = [HERE, "-k", "what_one_process_trains"]
    ended = launch.launch(name, ranks, chosen, reference.folder, seconds=420)
    assert ended.passed() == len(ON_RANKS)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[pytest.mark.matrix] if c in ALSO else [])
        for c in CHOSEN
    ],
)
def test_trains_the_same_model(case, backends_by_name, monkeypatch):
    monkeypatch.setattr(cases, "STEPS", 8)
    backend = backends_by_name("tf-mirrored:2" if case.replicas_matter else "single")
    wanted = train(case, backend, "float64")
    got = train(case, backend, "float64", recompute=True)
    assert differences(got, wanted, "float64") == []


def test_calls_a_block_again_and_python_once(backends_by_name):
    ran, traced = [], []

    class Noting(keras.layers.Layer):
        def call(self, x):
            traced.append(1)

            def note(array):
                ran.append(1)
                return array

            out = tf.numpy_function(note, [tf.stop_gradient(x)], x.dtype)
            out.set_shape(x.shape)
            return x + 0 * out

    def model():
        layers = [keras.Input((8,)), keras.layers.Dense(8, "tanh"), Noting()]
        layers += [keras.layers.Dense(cases.CLASSES)]
        return cases.compiled(keras.Sequential(layers), cases.sgd())

    backend = backends_by_name("single")
    rows = cases.labelled(np.random.default_rng(0), 4, 0)
    net = built(model, backend, spec_of(rows))
    traced.clear()
    step = make_step(get_prepared(net), backend, spec_of(rows), RECOMPUTE)
    assert len(traced) == 1
    step(own_part(rows, backend), 0)
    assert len(ran) == 2


def test_refuses_what_would_not_be_the_same(backends_by_name):
    class Draws(keras.layers.Layer):
        def call(self, x):
            return x * tf.random.uniform(tf.shape(x), dtype=x.dtype)

    class NoLayers(keras.Model):
        def build(self, shape):
            self.w = self.add_weight(shape=(cases.FEATURES, cases.CLASSES))

        def call(self, x):
            return x @ self.w

    backend = backends_by_name("single")
    rows = cases.labelled(np.random.default_rng(0), 4, 0)
    layers = [keras.Input((8,)), Draws(name="draws"), keras.layers.Dense(3)]
    for model, message in (
        (keras.Sequential(layers), "draws.* RandomUniform"),
        (NoLayers(), "calls no layer"),
    ):
        net = built(
            lambda m=model: cases.compiled(m, cases.sgd()), backend, spec_of(rows)
        )
        with pytest.raises(UsageError, match=message) as caught:
            make_step(get_prepared(net), backend, spec_of(rows), RECOMPUTE)
        assert caught.value.exit_code == 2


def test_cuts_keep_the_least():
    """Against all ways to cut, for random sizes; and the shape of a residual network."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 20, 8).tolist()
        kept = rng.integers(1, 20, 8).tolist()

        def cost(ends, sizes=sizes, kept=kept):
            blocks = [sum(sizes[s:e]) for s, e in itertools.pairwise([0, *ends])]
            return sum(kept[e - 1] for e in ends[:-1]) + max(blocks)

        best = min(
            cost([*chosen, 8])
            for count in range(8)
            for chosen in itertools.combinations(range(1, 8), count)
        )
        assert cost(cuts(sizes, kept)) <= 1.15 * best
    assert cuts([4, 4, 4, 1] * 9, [9, 9, 9, 1] * 9)[0] % 4 == 0
    assert cuts([], []) == [] and cuts([0, 0], [0, 0])[-1] == 2
