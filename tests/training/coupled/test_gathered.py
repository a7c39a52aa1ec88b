"""Losses and metrics that couple rows: those of the whole batch, as in stock Keras.

Plain, this file runs on one replica. Then it starts itself on ranks of ``native`` and
``mpi``. Each rank trains by stock ``keras.Model.fit`` alone what all ranks train together.
"""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from collective.errors import UsageError
from collective.training.assemble import make_step
from collective.training.input.pipeline import Input
from collective.training.prepare import prepare
from collective.training.step.plan import StepPlan
from collective.training.step.report import Averages
from collective.training.variants.coupled.look_ups import travelling_as_rows
from tests import launch
from tests.training.coupled.compared import NAMES, assert_same, planned, stock

HERE = "tests/training/coupled/test_gathered.py"
FEATURES = 5
MATRIX = pytest.mark.matrix
TOLERANCE = {"float32": 2e-6, "float64": 1e-10}

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.on_ranks]


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    return backends_by_name(request.param)


def rows(count, seed=3, outputs=2):
    """Rows of which no two are alike, with labels between 0 and 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(keras.config.floatx())
    y = (rng.uniform(size=(count, outputs)) > 0.5).astype(keras.config.floatx())
    return x, y


def network(loss, metrics=(), outputs=2, activation="sigmoid", **compiled):
    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input([FEATURES])
        hidden = keras.layers.Dense(
            6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)
        )(inputs)
        predicted = keras.layers.Dense(outputs, activation=activation)(hidden)
        model = keras.Model(inputs, predicted)
        chosen = [m if isinstance(m, str) else m() for m in metrics]
        model.compile(keras.optimizers.Adam(0.02), loss, metrics=chosen, **compiled)
        return model

    return make


def contrastive(y, predicted):
    """Each row against all others; y is not looked at."""
    near = ops.matmul(predicted, ops.transpose(predicted))
    return -ops.log_softmax(near, axis=-1)[:, 0] + 0.0 * y[:, 0]


def summed(y, predicted):
    """A scalar, as many losses on the web return."""
    return ops.sum(ops.square(y - predicted))


def correlated(y, predicted):
    """One minus a correlation over the rows of the batch."""
    a, b = y - ops.mean(y, axis=0), predicted - ops.mean(predicted, axis=0)
    return 1 - ops.sum(a * b) / (
        ops.sqrt(ops.sum(a * a) * ops.sum(b * b)) + ops.cast(1e-3, b.dtype)
    )


class Largest(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, predicted, sample_weight=None):
        error = ops.cast(ops.max(ops.abs(y - predicted)), self.value.dtype)
        self.value.assign(ops.maximum(self.value, error))

    def result(self):
        # A variable itself would be read after the validation has changed it.
        return self.value + 0


class Last(Largest):
    """The prediction of the last row so far, and how many rows there were."""

    def __init__(self):
        super().__init__()
        self.name = "last"
        self.rows = self.add_variable((), "zeros", dtype="int64", name="rows")

    def update_state(self, y, predicted, sample_weight=None):
        self.value.assign(ops.cast(predicted[-1, 0], self.value.dtype))
        self.rows.assign(self.rows + ops.cast(ops.shape(y)[0], "int64"))

    def result(self):
        return self.value + ops.cast(self.rows, self.value.dtype)


class BatchRank(keras.metrics.Metric):
    """The mean over batches of the share of pairs in the right order: an AUC each."""

    def __init__(self):
        super().__init__(name="batch_rank")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y, predicted, sample_weight=None):
        positive = y[:, 0] > 0.5
        pairs = ops.logical_and(positive[:, None], ops.logical_not(positive)[None])
        right = ops.logical_and(pairs, predicted[:, :1] > predicted[:, 0][None])
        count = ops.maximum(ops.sum(ops.cast(pairs, self.total.dtype)), 1)
        self.total.assign_add(ops.sum(ops.cast(right, self.total.dtype)) / count)
        self.batches.assign_add(1)

    def result(self):
        return self.total / ops.maximum(self.batches, 1)


class OwnLoss(keras.Model):
    """A loss that looks at x, at the weights, at the rows and at the forward pass' losses."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        coupled = correlated(y, y_pred) + ops.std(ops.sum(x, axis=1)) * ops.mean(y_pred)
        penalty = 0.1 * ops.sum(ops.square(self.layers[-1].kernel))
        again = ops.var(self(x[:, ::-1]))
        return coupled + penalty + again + ops.sum(self.losses)


def own_loss():
    keras.utils.set_random_seed(7)
    inputs = keras.Input([FEATURES])
    regular = keras.regularizers.L2(0.01)
    hidden = keras.layers.Dense(6, "tanh", kernel_regularizer=regular)(inputs)
    model = OwnLoss(inputs, keras.layers.Dense(2, "sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(0.02))
    return model


def two_outputs():
    keras.utils.set_random_seed(7)
    inputs = keras.Input([FEATURES])
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    first = keras.layers.Dense(2, "sigmoid", name="first")(hidden)
    second = keras.layers.Dense(2, name="second")(hidden)
    model = keras.Model(inputs, {"first": first, "second": second})
    model.compile(
        keras.optimizers.Adam(0.02),
        {"first": keras.losses.Dice(), "second": "mse"},
        loss_weights={"first": 0.7, "second": 0.4},
        metrics={"first": [Largest()], "second": ["mae"]},
    )
    return model


def masked():
    """Positions with token 0 are left out by the mask that y_pred carries."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input([4], dtype="int32")
    vectors = keras.layers.Embedding(5, 6, mask_zero=True)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(vectors))
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def tokens(count, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 5, (count, 4)).astype("int32")
    x[:, 0] = 1  # no row is masked as a whole
    return x, rng.integers(0, 3, (count, 4)).astype("int64")


METRICS = (Largest, Last, BatchRank, keras.metrics.MeanSquaredError)
LOSS, BOTH = StepPlan(gather_loss=True), StepPlan(True, True)
CASES = {
    "dice": (lambda: network(keras.losses.Dice()), rows, LOSS),
    "circle": (
        lambda: network(keras.losses.Circle(), outputs=4, activation=ops.normalize),
        lambda n, seed=3: (rows(n, seed)[0], np.arange(n, dtype="int32") % 3),
        LOSS,
    ),
    "contrastive": (lambda: network(contrastive, activation=None), rows, BOTH),
    "scalar-sum": (lambda: network(summed, ["mae"]), rows, LOSS),
    "correlation": (lambda: network(correlated, METRICS), rows, BOTH),
    "metrics-alone": (
        lambda: network("mse", METRICS),
        rows,
        StepPlan(gather_metrics=True),
    ),
    "weights": (
        lambda: network(keras.losses.Dice(), weighted_metrics=["mae"], metrics=METRICS),
        lambda n, seed=3: (*rows(n, seed), np.linspace(0.5, 2, n)),
        BOTH,
    ),
    "own-loss": (lambda: own_loss, rows, LOSS),
    "two-outputs": (
        lambda: two_outputs,
        lambda n, seed=3: (
            rows(n, seed)[0],
            {"first": rows(n, seed)[1], "second": rows(n, seed + 1)[1]},
        ),
        BOTH,
    ),
    "masked": (lambda: masked, tokens, BOTH),
}


@pytest.fixture(params=["float64", "float32"])
def precision(request):
    keras.config.set_floatx(request.param)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_trains_what_stock_keras_trains(name, precision, backend):
    """31 rows in batches of ten: the last has one row, so ranks are without rows.

    Keras shows the mean of an output's loss over *batches*, whatever their rows; so those
    of two outputs have equal batches.
    """
    make, data, plan = CASES[name]
    counts = (30, 20) if name == "two-outputs" else (31, 17)
    arguments = make(), data(counts[0]), data(counts[1], 9)
    wanted = stock(*arguments, backend)
    got = planned(*arguments, backend, plan)
    assert_same(got, wanted, TOLERANCE[precision])


def test_metrics_continue_in_the_middle_of_an_epoch(backend):
    """As from a checkpoint: what a step reports follows from the sums before it."""
    inputs = Input(rows(30), 10, shuffle=False)
    make = network("mse", METRICS)
    spec, places = inputs.spec, (backend.local_replicas, backend.replicas)

    def reports(first, sums=None):
        prepared = prepare(make, backend, spec, micro_batch_rows=10)
        step = make_step(prepared, backend, spec, plan=StepPlan(gather_metrics=True))
        averages = Averages(step.layout, sums)
        step.begin_epoch(averages.sums())
        prepared.model.optimizer.learning_rate = 0.0  # the same model at each step
        for number, batch in enumerate(inputs.dataset(0, 3, *places)):
            if number >= first:
                averages.add(step(batch, number))
                yield averages.sums().copy(), averages.logs()

    whole = list(reports(0))
    (_, resumed), *_ = reports(2, whole[1][0])
    assert resumed == whole[2][1]
    assert resumed["last"] > 30  # it counts rows


def test_integers_travel_exactly(backend):
    """Values that no float32 holds, next to half floats and truth values."""
    from collective.training.variants.coupled.gather import gather_rows
    from collective.training.variants.coupled.replica import ReplicaContext

    rng = np.random.default_rng(1)
    whole = {
        "int64": rng.integers(-(2**62), 2**62, (7, 2)),
        "uint64": rng.integers(2**63, 2**64 - 1, (7,), dtype=np.uint64),
        "bool": rng.uniform(size=(7, 3)) > 0.5,
        "half": rng.normal(size=(7, 1, 2)).astype("float16"),
        "double": rng.normal(size=(7, 2)),
    }
    start, stop = (7 * (backend.rank + i) // backend.size for i in range(2))

    @tf.function(autograph=False)
    def gather(own):
        def replica(own):
            context = ReplicaContext(
                backend,
                tf.cast(backend.replica(), tf.int64),
                tf.constant(stop - start, tf.int64),
                tf.constant(7, tf.int64),
                False,
            )
            return gather_rows(own, context)

        return backend.run(replica, (own,))

    got = gather(
        {name: tf.constant(value[start:stop]) for name, value in whole.items()}
    )
    for name, value in whole.items():
        np.testing.assert_array_equal(got[name], value)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05, clipnorm=1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.5, clipvalue=1e-3),
}


@pytest.mark.parametrize(
    "optimizer, masked",
    [("adam", True), ("rmsprop", False), ("ftrl", False), ("sgd", False)],
)
def test_look_ups_are_those_of_keras(optimizer, masked, backend):
    """Rows of an embedding that a batch, and a row of it, look up several times."""
    keras.config.set_floatx("float64")

    def make():
        keras.utils.set_random_seed(4)
        tokens = keras.Input((None,), dtype="int32")
        table = keras.layers.Embedding(7, 3, mask_zero=masked)(tokens)
        outputs = keras.layers.Dense(1)(keras.layers.LSTM(4)(table))
        model = keras.Model(tokens, outputs)
        model.compile(OPTIMIZERS[optimizer](), "mse")
        return model

    rng = np.random.default_rng(5)
    data = rng.integers(0, 7, (31, 6)), rng.normal(size=(31, 1))
    plan = StepPlan(gather_look_ups=True)
    got = planned(make, data, None, backend, plan)
    assert_same(got, stock(make, data, None, backend), 1e-10)
    combined = planned(make, data, None, backend, StepPlan())
    with pytest.raises(AssertionError):
        assert_same(combined, got, 1e-4)
    by_rows = planned(make, data, None, backend, StepPlan(as_rows=(0,)))
    assert_same(by_rows, combined, 1e-10)


class Bag(keras.layers.Layer):
    """The sum of the table's rows for the tokens of a row other than 0.

    Args:
        distinct: Whether a batch looks up each row of the table once.
    """

    def __init__(self, distinct):
        super().__init__()
        self.distinct = distinct

    def build(self, shape):
        self.table = self.add_weight(shape=(7, 3), name="table")

    def call(self, x):
        if self.distinct:
            given = tf.sparse.from_dense(x)
            return tf.nn.embedding_lookup_sparse(
                self.table.value, given, None, combiner="sum"
            )
        vectors = tf.gather(self.table.value, tf.boolean_mask(x, x > 0))
        rows = tf.where(x > 0)[:, 0]
        return tf.math.unsorted_segment_sum(vectors, rows, tf.shape(x)[0])

    def compute_output_shape(self, shape):
        return (shape[0], 3)


@pytest.mark.parametrize("distinct", [False, True])
def test_look_ups_of_which_rows_have_some_more(distinct, backend):
    keras.config.set_floatx("float64")

    def make():
        keras.utils.set_random_seed(4)
        tokens = keras.Input((6,), dtype="int32")
        outputs = keras.layers.Dense(1)(Bag(distinct)(tokens))
        model = keras.Model(tokens, outputs)
        model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    rng = np.random.default_rng(5)
    x = rng.integers(0, 7, (31, 6)).astype("int32")
    x[:, :2] = 1 + x[:, :2] // 2
    x[::3, 2:] = 0
    data = x, rng.normal(size=(31, 1))
    wanted = stock(make, data, None, backend)
    every = planned(make, data, None, backend, StepPlan(gather_look_ups=True))
    assert_same(every, wanted, 1e-10)
    by_rows = planned(make, data, None, backend, StepPlan(as_rows=(0,)))
    assert_same(by_rows, planned(make, data, None, backend, StepPlan()), 1e-10)


def test_a_large_table_travels_as_rows_where_these_are_fewer_bytes():
    tables = [tf.zeros(shape) for shape in ([10**6, 8], [10**6, 8], [100, 8])]
    prepared = SimpleNamespace(trainable=[keras.Variable(t) for t in tables])
    plan = StepPlan(look_ups=((0, 20), (1, 10**5), (2, 1)))
    assert travelling_as_rows(prepared, plan, 64) == (0,)


def test_strings_are_refused_by_name(backend):
    if backend.replicas == 1:
        pytest.skip("nothing is gathered")
    from collective.training.variants.coupled.gather import carrier_of

    with pytest.raises(UsageError, match="string"):
        carrier_of(tf.string)


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks, chosen",
    [
        ("native", 2, "float64 and own-loss or exactly or some_more"),
        pytest.param("native", 3, "float64 or not trains", marks=MATRIX),
        pytest.param("native", 2, "float64 or dice or not trains", marks=MATRIX),
        pytest.param(
            "mpi",
            2,
            "float64 and (weights or own-loss or masked) or exactly or look_ups",
            marks=MATRIX,
        ),
        pytest.param(
            "tf-multiworker",
            2,
            "float64 and (weights or own-loss or masked)",
            marks=MATRIX,
        ),
    ],
)
def test_on_ranks(name, ranks, chosen, tmp_path):
    pytest.importorskip("mpi4py")
    ended = launch.launch(name, ranks, [HERE, "-k", chosen], tmp_path, seconds=300)
    assert ended.passed()
