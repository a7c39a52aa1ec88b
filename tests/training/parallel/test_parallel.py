"""Layers sharded over ranks: the same model, with part of the memory on each rank.

Plain, this file starts itself on ranks. They compare the training of groups of them with one
process; and the test continues from their checkpoint.
"""

from __future__ import annotations

import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective import backends
from collective.backends.devices import local_devices
from collective.errors import CollectiveError, UsageError
from collective.training import Checkpoint
from collective.training.loop.callbacks import CallbackMethods
from collective.training.model.prepared import get_partition, get_prepared
from collective.training.parallel import (
    ColumnParallelDense,
    RowParallelDense,
    ShardedEmbedding,
)
from tests import launch
from tests.training import cases, small
from tests.training.parallel.stock import assert_as_keras, assert_close

pytestmark = pytest.mark.usefixtures("clean_keras")
HERE = "tests/training/parallel/test_parallel.py"
EARLY, ALL = 9, 14  # steps, in the second and in the third epoch
ROWS, BATCH, EPOCHS = 29, 7, 3
WORDS, LENGTH = 7, 4
RANKS = int(os.environ.get("COLLECTIVE_TEST_RANKS", "2"))
GROUPS = [parts for parts in (2, 4) if RANKS % parts == 0]
on_four = pytest.mark.skipif(RANKS < 4, reason="on four ranks")


def pair(units, **more):
    """Return a column-parallel layer, and a row-parallel one that takes its output."""
    return [
        ColumnParallelDense(units, activation="tanh", gather_output=False, **more),
        RowParallelDense(8, activation="tanh", input_is_parallel=True, **more),
    ]


def of_words(optimizer, *layers, **options):
    """Return a model of all three layers, with each way to join and split."""
    keras.utils.set_random_seed(11)
    net = [
        keras.Input((LENGTH,), dtype="int32"),
        ShardedEmbedding(WORDS, 3),  # no group divides this number
        keras.layers.Flatten(),
        *pair(16, kernel_regularizer=keras.regularizers.L2(0.01)),
        *layers,
        ColumnParallelDense(8, activation="softmax"),
        keras.layers.LayerNormalization(),
        RowParallelDense(2),
    ]
    made = keras.Sequential(net)
    made.compile(optimizer, **{"loss": "mse", "metrics": ["mae"]} | options)
    return made


def adam(**more):
    return keras.optimizers.Adam(0.05, **more)


def averaged():
    return keras.optimizers.AdamW(
        0.02, global_clipnorm=0.1, weight_decay=0.1, use_ema=True, ema_momentum=0.8
    )


def scaled():
    return keras.optimizers.LossScaleOptimizer(
        adam(clipnorm=0.1), initial_scale=1024.0, dynamic_growth_steps=4
    )


def masked():
    """Return a model with masks of words and of dropout, which are drawn equally."""
    keras.utils.set_random_seed(11)
    net = [
        keras.Input((LENGTH,), dtype="int32"),
        ShardedEmbedding(WORDS, 8, mask_zero=True),
        *pair(8),
        keras.layers.Dropout(0.3),
        keras.layers.LSTM(4),
        keras.layers.Dense(2, kernel_regularizer="l2"),
    ]
    made = keras.Sequential(net)
    made.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
    return made


class Own(keras.Model):
    """Calls its layers in Python, some of them in a loop."""

    def __init__(self):
        super().__init__()
        self.first, self.second = pair(8)
        self.last = RowParallelDense(2)

    def call(self, x):
        x = tf.cast(x, self.compute_dtype)[..., None]

        def step(i, state):
            seen = tf.concat([state, tf.gather(x, i, axis=1)], 1)
            return i + 1, self.second(self.first(seen))

        begin = step(0, tf.repeat(x[:, 0], 8, 1))
        _, state = tf.while_loop(lambda i, _: i < LENGTH, step, begin)
        return self.last(state)


def looping():
    keras.utils.set_random_seed(11)
    made = Own()
    made.compile(adam(), "mse", metrics=["mae"])
    return made


def far_apart(y_true, y_pred):
    """Return a loss of pairs of rows."""
    return tf.reduce_mean((y_true[:, None] - y_pred[None]) ** 2)


# By name: the maker of the model, and options of ``fit``.
CASES = {
    "clipped": (lambda: of_words(averaged()), {"accumulate": 2}),
    "look-ups": (lambda: of_words(adam(clipnorm=0.01)), {}),
    "scaled": (lambda: of_words(scaled()), {}),
    "masked": (masked, {}),
    "accumulators": (
        lambda: of_words(adam(gradient_accumulation_steps=2, global_clipnorm=0.1)),
        {},
    ),
    "rows-coupled": (
        lambda: of_words(
            keras.optimizers.SGD(0.1),
            keras.layers.BatchNormalization(),
            loss=far_apart,
        ),
        {},
    ),
    "looping": (looping, {}),
}
# All of these run on four ranks.
CHOSEN = CASES if RANKS > 2 else ("clipped",)


SPEC = cases.spec_of((np.zeros((1, LENGTH), "int32"), np.zeros((1, 2)), None))


def data():
    rng = np.random.default_rng(5)
    x = rng.integers(0, WORDS, (ROWS, LENGTH)).astype("int32")
    return x, rng.normal(size=(ROWS, 2))


def model(optimizer=None):
    keras.utils.set_random_seed(11)
    layers = [keras.Input((small.FEATURES,)), *pair(8)]
    layers += [keras.layers.Dense(small.CLASSES)]
    return cases.compiled(keras.Sequential(layers), optimizer or small.adamw())


def trained(backend, folder, steps):
    """Train up to a checkpoint; return the losses."""
    checkpoint = Checkpoint(folder, every=4, resume=True)
    result = small.train(backend, model=model, steps=steps, checkpoint=checkpoint)
    return np.array(result.losses)


if launch.launched():

    @pytest.fixture(scope="module", autouse=True)
    def devices():
        local_devices(2)  # before TensorFlow starts

    @pytest.fixture(scope="module", params=GROUPS)
    def backend(request):
        options = backends.Options(tensor_parallel=request.param)
        made = backends.get("native", options)
        yield made
        made.barrier()

    @on_four
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_places_layers_on_devices_of_each_rank(accumulate):
        backend = backends.get("native", backends.Options(model_parallel=2))
        make = lambda: of_words(averaged())  # noqa: E731
        assert_as_keras(make, data(), backend, accumulate=accumulate)

    @pytest.mark.parametrize("name", CHOSEN)
    def test_trains_what_keras_trains(name, backend):
        if backend.tensor.parts > 2 and name not in ("clipped", "looping"):
            pytest.skip("in groups of two")
        make, options = CASES[name]
        x, y = data()
        if name == "scaled":
            y[-10] = np.inf  # in the last trained row, so the update is skipped
        if name == "masked":
            options = options | {"sample_weight": np.linspace(0, 2, ROWS)}
        assert_as_keras(make, (x, y), backend, **options)

    def test_all_ranks_skip_what_overflows_on_one(backend):
        made = cases.built(lambda: of_words(scaled()), backend, SPEC)
        gradient = tf.constant(np.inf if backend.tensor.part == 0 else 1.0)
        with get_prepared(made).trains():
            assert not made.optimizer.check_finite([gradient])
            assert made.optimizer.check_finite([tf.constant(1.0)])

    def test_keeps_its_shard(backend):
        made = cases.built(lambda: of_words(averaged()), backend, SPEC)
        table = made.layers[0].embeddings
        assert abs(table.shape[0] - WORDS / backend.tensor.parts) < 1
        parts = get_partition(made)
        assert parts.shape_of(table) == (WORDS, 3)
        cut = [v for v in made.optimizer.variables if parts.shape_of(v)]
        assert (
            len(cut) == 3 * 7
        )  # two moments and an average: 1 table, 4 kernels, 2 biases

    def test_checkpoints_are_whole(backend, reference):
        keras.config.set_floatx("float64")
        parts = backend.tensor.parts
        got = trained(backend, reference.folder / f"from-one-{parts}", ALL)
        assert_close(got, np.load(reference.folder / "by-one.npy"))
        trained(backend, reference.folder / f"by-{parts}", EARLY)

    REFUSED = {
        "no layer of model": {"model": small.model()},
        "treat each element": {"model": lambda: model(keras.optimizers.Lamb())},
        "built with whole": {"model": lambda: built(model())},
        "a training has one": {"shard_optimizer": True},
        "units, which": {"model": lambda: of(ColumnParallelDense(7))},
        "inputs, which": {"model": lambda: of(RowParallelDense(3), 7)},
        "a constraint": {
            "model": lambda: of(RowParallelDense(3, kernel_constraint="max_norm"))
        },
        "not a sum over": {
            "model": lambda: of(
                RowParallelDense(
                    3, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()
                )
            )
        },
        "needs all units": {
            "model": lambda: of(
                ColumnParallelDense(8, activation="softmax", gather_output=False)
            )
        },
        "along the axis": {"model": lambda: of(ShardedEmbedding(1, 3))},
    }

    def of(layer, features=small.FEATURES):
        layers = [keras.Input((features,)), layer, keras.layers.Dense(small.CLASSES)]
        return cases.compiled(keras.Sequential(layers), cases.sgd())

    def built(made):
        made.optimizer.build(made.trainable_variables)
        return made

    @pytest.mark.parametrize("message", REFUSED)
    def test_refuses_layers_that_cannot_be_split(message, backend):
        arguments = {"model": model} | REFUSED[message]
        with pytest.raises(UsageError, match=message) as caught:
            small.train(backend, steps=1, **arguments)
        assert caught.value.exit_code == 2

    def test_callbacks_read_and_change_whole_weights(backend):
        """They do so on rank 0; the others get shards of its values."""
        seen = {}

        class Doubling(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                table = self.model.layers[0].embeddings
                seen["shape"], seen["before"] = tuple(table.shape), table.numpy()
                table.assign(2 * table)

            def on_train_batch_begin(self, batch, logs=None):
                seen.setdefault("after", self.model.layers[0].get_weights()[0])

        steps = 1
        made = cases.built(lambda: of_words(averaged()), backend, SPEC)
        methods = CallbackMethods(Doubling(), made, backend, {})
        methods.agree()
        methods.call("on_train_begin", (), {})
        methods.call("on_train_batch_begin", (0, steps), 0, {})
        parts, table = get_partition(made), made.layers[0].embeddings
        whole = parts.gather(everywhere=True)[id(table)]
        assert table.shape[0] < WORDS
        if backend.rank == 0:
            assert seen["shape"] == (WORDS, 3) == seen["before"].shape
            assert_close(seen["after"], 2 * seen["before"])
            assert_close(whole, seen["after"])
        assert_close(np.asarray(table), parts.cut(table, whole))

    class Norm(keras.layers.Layer):
        """Adds the norm of a kernel to the loss; each rank has a shard of the kernel."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def call(self, x):
            self.add_loss(keras.ops.norm(self.layer.kernel))
            return x

    def test_refuses_what_parts_the_ranks(backend):
        def normed():
            first, second = pair(8)
            layers = [keras.Input((small.FEATURES,)), first, second, Norm(first)]
            return cases.compiled(keras.Sequential(layers), cases.sgd())

        with pytest.raises(UsageError, match="differs between the ranks") as caught:
            small.train(backend, model=normed, steps=1)
        assert caught.value.exit_code == 2

    @on_four
    def test_names_the_rank_that_is_not_finite(backend):
        def poisoned():
            made = model()
            # The last shard of the first replica.
            if backend.rank == backend.tensor.parts - 1:
                made.layers[0].kernel.assign(made.layers[0].kernel * np.nan)
            return made

        with pytest.raises(CollectiveError, match="not finite on rank") as caught:
            small.train(backend, model=poisoned, steps=2, terminate_on_nan=True)
        assert caught.value.everywhere
        backend.barrier()


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_on_ranks(ranks, tmp_path, backends_by_name):
    groups = [parts for parts in (2, 4) if ranks % parts == 0]
    keras.config.set_floatx("float64")
    single = backends_by_name("single")
    for parts in groups:
        trained(single, tmp_path / f"from-one-{parts}", EARLY)
    wanted = trained(single, tmp_path / "wanted", ALL)
    np.save(tmp_path / "by-one.npy", wanted)
    more = {"COLLECTIVE_TEST_RANKS": str(ranks)}
    ended = launch.launch("native", ranks, [HERE], tmp_path, seconds=590, **more)
    assert ended.code == 0, ended.output
    assert all(len(outcomes) > 15 for outcomes in ended.outcomes)
    message = {outcome for outcomes in ended.outcomes for outcome in outcomes.values()}
    assert message <= {"passed", "skipped"}, ended.output
    for parts in groups:
        assert_close(trained(single, tmp_path / f"by-{parts}", ALL), wanted)


WRONG = {
    "2 ranks cannot be cut into groups of 3": "--tensor-parallel 3",
    "with a rank that dies": "--tensor-parallel 2 --min-np 1",
    "an option of backend 'native'": "--tensor-parallel 2 --backend mpi",
    "no layer of model 'mlp'": "--tensor-parallel 2 --model mlp",
    "--tensor-parallel does not work with layers on several": "--tensor-parallel 2 --model-parallel 2",
}


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_end_with_2(message):
    arguments = [sys.executable, "train.py", "--steps", "1", *WRONG[message].split()]
    start = launch.command("mpi" if "mpi" in message else "native", 2)
    code, printed = launch.run(
        [*start, *arguments], launch.environment(forked=True), 100
    )
    assert code == 2 and message in printed and "HINT: " in printed
