"""The step is compared with Keras' own before it trains: what is found, and what is not.

One process; the pieces stand for replicas.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from collective import backends
from collective.training import keras_compat
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.prepare import prepare
from collective.training.step.plan import StepPlan
from collective.training.verification import verify, verify_step
from tests.training.verification.checked import (
    FEATURES,
    OUTPUTS,
    PIECES,
    ROWS,
    Center,
    Penalty,
    State,
    data,
    network,
    refused,
    verified,
)

pytestmark = pytest.mark.usefixtures("clean_keras", "own_cache")


@pytest.fixture(autouse=True)
def float32_again():
    yield
    keras.config.set_dtype_policy("float32")


# --- losses -----------------------------------------------------------------------


def scalar_sum(y, p):
    return ops.sum((y - p) ** 2)


def halves(y, p):
    first, second = ops.split(p, 2, axis=0)
    return ops.mean((first - second) ** 2)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (lambda: keras.losses.Dice(), "dice"),
        (lambda: scalar_sum, "scalar_sum"),
        (lambda: halves, "halves"),
    ],
)
def test_a_loss_that_couples_rows_is_gathered(loss, name):
    plan = verified(network(loss=loss(), activation="sigmoid"))
    assert plan.gather_loss and not plan.gather_metrics
    assert plan.notes == (
        f"loss {name!r} couples the rows of a batch: predictions are gathered from all "
        "replicas each step",
    )


def test_circle_is_gathered():
    model = network(keras.layers.UnitNormalization(), loss=keras.losses.Circle())
    assert verified(model, data(labels=True)).gather_loss


def test_one_of_two_outputs_couples_rows():
    inputs = keras.Input((FEATURES,))
    first = keras.layers.Dense(OUTPUTS, "sigmoid", name="first")(inputs)
    second = keras.layers.Dense(OUTPUTS, name="second")(inputs)
    model = keras.Model(inputs, [first, second])
    model.compile("adam", [keras.losses.Dice(), "mse"], loss_weights=[0.3, 0.7])
    x, y = data()
    assert verified(model, (x, (y, y))).gather_loss


@pytest.mark.parametrize("where", ["loss", "added"])
def test_parts_in_float32_may_round_in_a_float64_model(where):
    """As a CTC loss, whose operation has no other type."""
    keras.config.set_dtype_policy("float64")

    def rounded(values):
        return ops.cast(ops.mean(ops.cast(values, "float32")), "float64")

    def loss(y, p):
        return rounded((y - p) ** 2) if where == "loss" else (y - p) ** 2

    more = [Penalty(lambda x: rounded(x))] if where == "added" else []
    plan = verified(network(*more, loss=loss))
    assert plan == StepPlan()


class Average(keras.losses.Loss):
    """A loss that calls another one."""

    def __init__(self):
        super().__init__(name="average")
        self.inner = keras.losses.MeanSquaredError()

    def call(self, y, p):
        return self.inner(y, p)


class Flat(keras.losses.Loss):
    """A value for each number instead of each row."""

    def call(self, y, p):
        return (ops.reshape(y, [-1]) - ops.reshape(p, [-1])) ** 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda: "mse",
        Flat,
        lambda: keras.losses.MeanSquaredError(reduction=None),
        lambda: keras.losses.MeanSquaredError(reduction="sum"),
    ],
)
@pytest.mark.parametrize("pieces", [PIECES, 1], ids=["cut", "whole"])
def test_losses_that_are_sums_over_rows(loss, pieces):
    weights = np.random.default_rng(4).uniform(size=ROWS).astype("float32")
    model = network(loss=loss(), metrics=["mae"])
    assert verified(model, (*data(), weights), pieces=pieces) == StepPlan()


def test_a_loss_that_calls_another_one():
    """Its value is a mean, which it is no longer times weights of the rows."""
    assert verified(network(loss=Average())) == StepPlan()
    assert verified(network(loss=Average()), pieces=1) == StepPlan()
    weights = np.arange(ROWS, dtype="float32")
    assert verified(network(loss=Average()), (*data(), weights)).gather_loss


def test_added_losses():
    assert verified(network(Penalty(ops.mean))) == StepPlan()
    both = network(Penalty(ops.mean), Penalty(ops.sum))
    assert verified(both) == StepPlan(added_sums=(1,))


class OwnLoss(keras.Model):
    """Computes its loss itself, and another one in validation."""

    def __init__(self, reduce):
        super().__init__(name="own")
        self.reduce = reduce
        self.dense = keras.layers.Dense(OUTPUTS)

    def call(self, x):
        return self.dense(x)

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return (2 if training else 1) * self.reduce((y - y_pred) ** 2)


def test_a_compute_loss_of_the_users_own():
    for reduce, gathered in ((ops.mean, False), (ops.std, True)):
        model = OwnLoss(reduce)
        model.compile("adam")
        assert verified(model).gather_loss == gathered


# --- the model --------------------------------------------------------------------


def centred():
    """Couples rows, in none of its layers."""
    inputs = keras.Input((FEATURES,))
    outputs = keras.layers.Dense(OUTPUTS)(inputs - ops.mean(inputs, 0, keepdims=True))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    return model


def test_a_model_that_couples_rows():
    refused(centred(), "couples the rows of a batch: what it predicts")
    assert verified(centred(), pieces=1) == StepPlan()


def test_batch_normalization_is_named_and_the_rest_is_checked():
    layer = keras.layers.BatchNormalization(name="norm")
    (note,) = verified(network(layer)).notes
    assert note.startswith("BatchNormalization ('norm') normalizes by the rows of one")
    assert not verified(network(keras.layers.BatchNormalization()), pieces=1).notes
    assert not verified(
        network(keras.layers.BatchNormalization()), sync_batch_norm=True
    ).notes
    layer = keras.layers.BatchNormalization()
    assert verified(network(layer, loss=scalar_sum)).gather_loss


class Noise(keras.layers.Layer):
    """Draws by keras.random, without a seed."""

    def call(self, x, training=False):
        return x + keras.random.normal(ops.shape(x)) if training else x


class TensorFlowNoise(keras.layers.Layer):
    def call(self, x, training=False):
        return tf.nn.dropout(x, 0.5) if training else x


def test_all_but_the_numbers_of_random_layers_is_checked():
    layers = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)]
    for layer in (*layers, Noise(), TensorFlowNoise()):
        assert verified(network(layer)) == StepPlan()
        assert verified(network(layer, loss=scalar_sum)).gather_loss


def test_layers_that_assign_their_weights():
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(8))
    assert verified(network(layer)) == StepPlan()


# --- metrics and state ------------------------------------------------------------


class Kept(keras.metrics.Metric):
    """One variable, changed by a function of it and of the errors."""

    def __init__(self, change, name):
        super().__init__(name=name)
        self.change = change
        self.kept = self.add_weight(name="kept", initializer="zeros")

    def update_state(self, y, p, sample_weight=None):
        self.kept.assign(self.change(self.kept, ops.abs(y - p)))

    def result(self):
        return self.kept


def test_metrics():
    extreme = Kept(lambda old, errors: ops.maximum(old, ops.max(errors)), "largest")
    coupled = Kept(lambda old, errors: old + ops.std(errors), "spread")
    hits = Kept(lambda old, errors: old + ops.sum(errors), "hits")
    assert verified(network(metrics=[hits, "mae"])) == StepPlan()
    for metric in (extreme, coupled):
        plan = verified(network(metrics=[metric, "mae"]))
        assert plan.gather_metrics and not plan.gather_loss
        assert plan.notes == (
            f"metric {metric.name!r} is not a sum over rows: predictions are gathered "
            "from all replicas each step",
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda old, x: old + ops.cast(ops.shape(x)[0], "float32"),
        lambda old, x: old + ops.sum(x),
        lambda old, x: ops.maximum(old - 9, ops.max(x)),
    ],
    ids=["rows", "sum", "maximum"],
)
def test_state_that_counts_rows_is_refused(change):
    """With accumulate, where no layer sees a whole batch."""
    message = "state '.*layer/state' is not a mean"
    refused(network(State(change, name="layer")), message, accumulate=2)
    assert verified(network(State(change)), pieces=1) == StepPlan()


def test_state_that_is_a_mean_or_counts_steps():
    for change in (
        lambda old, x: 0.9 * old + 0.1 * ops.mean(x),
        lambda old, x: old + 1,
    ):
        assert verified(network(State(change))) == StepPlan()


class Outside(keras.layers.Layer):
    """Counts its calls in a variable that Keras does not know."""

    def build(self, shape):
        self.calls = tf.Variable(0.0, trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def test_variables_outside_the_model():
    layer = Outside()
    model = network(layer)
    model(np.zeros([1, FEATURES], "float32"))
    before = layer.calls.numpy()
    refused(model, "writes '.*calls:0', which is none of its variables")
    assert layer.calls.numpy() == before


# --- precision, what is skipped, the cache ----------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_every_precision(policy):
    keras.config.set_dtype_policy(policy)
    if policy == "float64":
        keras.config.set_floatx(policy)
    given = tuple(a.astype(keras.config.floatx()) for a in data())
    assert verified(network(metrics=["mae"]), given) == StepPlan()
    assert verified(
        network(loss=keras.losses.Dice(), activation="sigmoid"), given
    ).gather_loss


def test_off_by_an_argument_and_by_a_variable(monkeypatch):
    assert verified(network(Center()), enabled=False) == StepPlan()
    monkeypatch.setenv(verify.VARIABLE, "0")
    assert verified(network(Center())) == StepPlan()


def test_an_outcome_serves_the_next_run_of_the_same_model_only(monkeypatch):
    runs = []
    run = verify.Check.run
    monkeypatch.setattr(
        verify.Check, "run", lambda self, *a: runs.append(1) or run(self, *a)
    )
    first = verified(network(loss=keras.losses.Dice()))
    monkeypatch.setattr(verify, "_known", {})  # as in another process
    assert verified(network(loss=keras.losses.Dice())) == first and len(runs) == 1

    def scaled(factor):
        return lambda y, p: factor * (y - p) ** 2

    for factor, expected in ((2.0, 2), (2.0, 2), (3.0, 3)):
        verified(network(loss=scaled(factor)))
        assert len(runs) == expected
    verified(network(keras.layers.Dense(4), loss=scaled(3.0)))
    assert len(runs) == 4


def test_the_key_is_the_graph_and_the_kind_of_rows(monkeypatch):
    """Not the text of the code alone: settings that it reads, labels to ignore."""
    runs = []
    run = verify.Check.run
    monkeypatch.setattr(
        verify.Check, "run", lambda self, *a: runs.append(1) or run(self, *a)
    )
    state = {"power": 2.0}

    def hidden():  # a description of the code ends before it
        return state["power"]

    hidden.__module__ = "keras.as_if_known"

    def loss(y, p):
        return ops.mean(ops.abs(y - p) ** hidden(), axis=-1)

    for power, expected in ((2.0, 1), (2.0, 1), (3.0, 2)):
        state["power"] = power
        verified(network(loss=loss))
        assert len(runs) == expected
    x, y = data()
    y[3] = -100
    verified(network(loss=loss), (x, y))
    assert len(runs) == 3


def ratio(y, p):
    """By the number of labels that count: one value of all rows."""
    counts = ops.cast(ops.all(y >= 0, axis=-1), p.dtype)
    errors = ops.mean((y - p) ** 2, axis=-1) * counts
    return ops.sum(errors) / (ops.sum(counts) + 1e-9)


@pytest.mark.parametrize("batched", [True, False], ids=["batches", "rows"])
def test_labels_of_a_pipeline_are_the_users_own(batched):
    """Strings among them; and the training still has every row."""
    x, y = data()
    y[::3] = -100
    words = np.array(["a", "b", "c"])[np.arange(ROWS) % 3]
    rows = tf.data.Dataset.from_tensor_slices(({"x": x, "word": words}, y))
    inputs = keras.Input((FEATURES,), name="x")
    text = keras.Input((1,), name="word", dtype="string")
    number = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    both = keras.layers.Concatenate()([inputs, number(text)])
    model = keras.Model([inputs, text], keras.layers.Dense(OUTPUTS)(both))
    model.compile("sgd", ratio)
    backend = backends.get("single")
    if batched:
        made = Batches(keras_compat.adapter(rows.batch(8)), backend)
    else:
        made = Input(rows.apply(lambda d: d), 8)
    prepared = prepare(model, backend, made.spec, micro_batch_rows=8)
    assert verify_step(prepared, backend, made, pieces=PIECES).gather_loss
    if batched:
        sizes = [int(batch.global_rows) for batch in made.epoch(9)]
        assert sizes == [8, 8, 8]
        made.reset()
        assert len(list(made.epoch(9))) == 3


def test_a_term_whose_weight_starts_at_zero():
    weight = keras.Variable(0.0, name="annealed")

    def annealed(y, p):
        return ops.mean((y - p) ** 2, axis=-1) + weight * ops.std(p)

    assert verified(network(loss=annealed)).gather_loss
    assert float(weight) == 0.0


class Halved(keras.optimizers.SGD):
    """Keras' own step uses another rate than ``apply``."""

    def apply_gradients(self, grads_and_vars, **kwargs):
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply([0.5 * g for g in grads], variables)


def test_weights_after_two_steps_are_compared():
    assert verified(network(optimizer=keras.optimizers.AdamW(0.01, use_ema=True)))
    refused(network(optimizer=Halved(0.1)), "the optimizer's update of")


def test_a_table_of_the_users_own_is_a_look_up():
    class Table(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight((5, OUTPUTS), name="table")

        def call(self, x):
            return ops.take(self.table, ops.cast(x[:, 0] > 0, "int32"), axis=0)

    plan = verified(network(Table()))
    assert plan.look_ups


def test_errors_are_not_kept():
    for _ in range(2):
        refused(centred(), "couples the rows")
