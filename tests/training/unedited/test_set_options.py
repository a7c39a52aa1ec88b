"""Options of ``--set`` under Keras' own loops: the numbers of stock Keras, and what they add.

Plain, this file trains in one process, and starts itself on two ranks, where each rank fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.distribute.unedited import distribute_keras
from collective.errors import UsageError
from collective.training.steps.batch_function import BatchFunction
from collective.training.verification import stock_run
from tests import launch
from tests.training.small import NAMES, on_rank_zero

HERE = "tests/training/unedited/test_set_options.py"
pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]
RNG = np.random.default_rng(7)
X = RNG.normal(size=(37, 6))
Y = RNG.normal(size=(37, 1))


@pytest.fixture(scope="module")
def backend(backends_by_name):
    return backends_by_name(NAMES[0])


def make(**compiled) -> keras.Model:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.5)
    model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def fitted(model: keras.Model, **more) -> list[np.ndarray]:
    """Return history and weights of two epochs with a validation."""
    words = dict(batch_size=8, epochs=2, validation_split=0.2, verbose=0)
    history = model.fit(X, Y, **words | more)
    return [*map(np.array, history.history.values()), *model.get_weights()]


def with_options(backend, model=None, **options) -> list[np.ndarray]:
    distribution = distribute_keras(backend, output="all", **options)
    try:
        return fitted(model or make())
    finally:
        distribution.undo()


def assert_equal(found, wanted, tolerance=1e-10):
    if wanted is None:
        return
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, tolerance, 1e-12)


class Stops(keras.callbacks.Callback):
    """Ends a training after some steps."""

    def __init__(self, steps: int):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left == 0


@pytest.fixture(scope="module")
def wanted(backend) -> Callable[[int | None], list[np.ndarray] | None]:
    """Return what stock Keras gives after a number of steps, or after all."""
    known: dict[int | None, list[np.ndarray] | None] = {}

    def get(steps: int | None = None) -> list[np.ndarray] | None:
        if steps not in known:
            words = {} if steps is None else {"callbacks": [Stops(steps)]}
            known[steps] = on_rank_zero(backend, lambda: fitted(make(), **words))
        return known[steps]

    return get


@pytest.mark.on_ranks
@pytest.mark.parametrize(
    "options",
    [
        {"virtual_replicas": 4},
        {"virtual_replicas": 3, "accumulate": 2},
        {"accumulate": 3},
        # Of 4 steps each epoch: it stops within the second.
        {"terminate_on_nan": True, "check_every": 2, "steps": 7},
    ],
    ids=str,
)
def test_the_numbers_are_those_of_keras(backend, options, wanted):
    stock, model = wanted(options.get("steps")), make()
    assert_equal(with_options(backend, model, **options), stock)
    assert isinstance(model.train_function, BatchFunction) or backend.size == 1


def test_steps_end_a_training_of_one_process(backends_by_name):
    """Keras' own step serves there unless somebody counts its calls."""
    found = with_options(backends_by_name("single"), steps=7)
    for one, other in zip(found, fitted(make(), callbacks=[Stops(7)]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.on_ranks
def test_a_timeline_has_every_step_and_validation(backend, tmp_path):
    file = tmp_path / "trace.json"
    if backend.size > 1:
        from collective.training.process.object_collectives import broadcast_object

        file = broadcast_object(backend, file)
    with_options(backend, timeline=str(file))
    if backend.rank == 0:
        text = file.read_text().strip().rstrip(",").removesuffix("]")
        events = json.loads(text.rstrip().rstrip(",") + "]")
        rows = {e["pid"] for e in events}
        assert rows == set(range(backend.size))
        names = [e["name"] for e in events if e["pid"] == 0]
        assert names.count("step") == 8 and names.count("validation") == 2
        assert names.count("all-reduce") == 8


@pytest.mark.on_ranks
def test_steps_beside_keras_are_shown(backend, monkeypatch, wanted):
    stock, shown = wanted(), []
    show = stock_run.stock_run_table.show

    def recording(steps, *rest, **more):
        shown[:] = steps
        show(steps, *rest, **more)

    monkeypatch.setattr(stock_run.stock_run_table, "show", recording)
    assert_equal(with_options(backend, verify="run:5"), stock)
    if backend.rank == 0:
        assert [step.rows for step in shown] == [8, 8, 8, 5, 8]
        assert max(step.weights for step in shown) < 1e-12
        assert max(abs(a - b) for a, b in (step.losses for step in shown)) < 1e-12


@pytest.mark.on_ranks
def test_a_hook_compresses(backend):
    keras.utils.set_random_seed(3)
    wide = keras.Sequential([keras.layers.Dense(64), keras.layers.Dense(1)])  # no Input
    wide.compile("sgd", "mse")
    found = with_options(backend, wide, hook="powersgd:2")
    assert all(np.isfinite(one).all() for one in found)
    assert wide.train_function.hook.errors  # a kernel of rank 6 is sent with rank 2


@pytest.mark.on_ranks
def test_each_replica_has_a_batch_of_its_own(backend, wanted):
    stock = wanted()
    found = with_options(backend, per_replica=True)
    if stock is not None and backend.size > 1:  # BatchNormalization of fewer rows
        assert abs(found[-1] - stock[-1]).max() > 1e-6


@pytest.mark.on_ranks
def test_a_model_that_runs_eagerly(backend, tmp_path):
    stock = on_rank_zero(backend, lambda: fitted(make(run_eagerly=True)))
    model = make(run_eagerly=True)
    assert_equal(with_options(backend, model, virtual_replicas=2), stock)


@pytest.mark.on_ranks
def test_a_batch_that_is_too_small_is_refused(backend):
    with pytest.raises(UsageError, match="cannot be cut into 9 virtual"):
        with_options(backend, virtual_replicas=9)


def test_a_seed_is_that_of_the_script(backends_by_name):
    drawn = []
    for seed in (5, 5, 6):
        distribution = distribute_keras("single", seed=seed)
        drawn.append([np.random.rand(), float(tf.random.uniform([]))])
        distribution.undo()
    keras.utils.set_random_seed(5)
    assert drawn[0] == drawn[1] == [np.random.rand(), float(tf.random.uniform([]))]
    assert drawn[2] != drawn[0]


@pytest.mark.parametrize(
    "options, match",
    [
        ({"ledger": "rows.txt"}, "ledger cannot be set for an unedited script"),
        ({"global_batch_size": 64}, "global_batch_size cannot be set"),
        ({"virtual_replicas": 0}, "there must be one at least"),
        ({"virtual_replicas": 2, "hook": "powersgd"}, "each replaces the sum"),
        ({"hook": "gzip"}, "unknown communication hook"),
        ({"verify": "runs"}, "neither True, False nor 'run'"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        distribute_keras("single", **options)
    assert "fit" not in vars(keras.Model)


@pytest.mark.launches
@launch.NOT_ON_RANKS
@launch.NEEDS_CORE
def test_on_two_ranks(tmp_path):
    tests = [HERE, "-m", "on_ranks"]
    assert launch.launch("native", 2, tests, tmp_path, seconds=300).passed()
