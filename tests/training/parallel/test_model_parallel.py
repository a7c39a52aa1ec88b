"""Layers on several devices: the same model, with each layer's work on its device."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective import backends
from collective.errors import UsageError
from collective.training.model.prepared import get_prepared
from collective.training.parallel import layer_placement
from collective.training.steps.partitioned_step import PartitionedStep
from tests.training import cases, small
from tests.training.cases import built, own_part, spec_of
from tests.training.parallel.stock import assert_as_keras

pytestmark = pytest.mark.usefixtures("clean_keras")


def on_devices(count):
    return backends.get("single", backends.Options(model_parallel=count))


def shared():
    """Return a model with a layer called twice, a skip connection, a state, a nested model."""
    inner = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, "tanh")])
    twice = keras.layers.Dense(16, kernel_regularizer="l2")
    inputs = keras.Input((cases.FEATURES,))
    first = keras.layers.Dense(16, "tanh")(inputs)
    x = keras.layers.BatchNormalization(epsilon=0.1)(twice(inner(first)))
    x = keras.layers.add([keras.layers.Dropout(0.2)(twice(x)), first])
    outputs = keras.layers.Dense(cases.CLASSES)(x)
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True)
    return cases.compiled(keras.Model(inputs, outputs), optimizer)


class Own(keras.Model):
    """A functional model with its own step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}


def own_step():
    inputs = keras.Input((cases.FEATURES,))
    x = keras.layers.Dense(16, "tanh")(inputs)
    outputs = keras.layers.Dense(cases.CLASSES)(keras.layers.Dropout(0.2)(x))
    made = Own(inputs, outputs)
    made.compile(cases.sgd(), keras.losses.SparseCategoricalCrossentropy(True))
    return made


def masks():
    layers = [
        keras.Input((cases.LENGTH,), dtype="int32"),
        keras.layers.Embedding(cases.WORDS, 8, mask_zero=True),
        keras.layers.LSTM(6),
        keras.layers.Dense(cases.CLASSES),
    ]
    return cases.compiled(keras.Sequential(layers), cases.adam())


def scaled():
    inner = keras.optimizers.Adam(0.01, clipnorm=0.05)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    layers = [keras.layers.Dense(n, "tanh") for n in (8, 8)]
    layers = [keras.Input((cases.FEATURES,)), *layers, keras.layers.Dense(3)]
    return cases.compiled(keras.Sequential(layers), optimizer)


# By name: the model, the number of devices, and options.
CASES = {
    "shared": (shared, 3, {"accumulate": 3}),
    "own-step": (own_step, 2, {}),
    "masks": (masks, 2, {}),
    "scaled": (scaled, 3, {}),
}
ROWS = 29


@pytest.mark.parametrize(
    "name",
    [
        *("shared", "scaled"),
        *(pytest.param(n, marks=pytest.mark.matrix) for n in ("masks", "own-step")),
    ],
)
def test_trains_the_model_of_one_device(name):
    make, devices, options = CASES[name]
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(ROWS, cases.FEATURES)), rng.integers(0, 3, ROWS)
    if name == "masks":
        x = rng.integers(0, cases.WORDS, (ROWS, cases.LENGTH)).astype("int32")
    if name == "scaled":
        x[-10] = np.inf  # the last trained row, so the update is skipped

    def model():
        keras.utils.set_random_seed(11)
        return make()

    assert_as_keras(model, (x, y), on_devices(devices), **options)


def test_everything_of_a_layer_is_on_its_device():
    backend = on_devices(4)
    rows = cases.labelled(np.random.default_rng(0), 4, 0)

    def model():
        # The first two have no activation between them: one makes a gradient of the other.
        layers = [keras.layers.Dense(n, a) for n, a in ((32, None), (16, "tanh"))]
        layers += [keras.layers.Dense(8), keras.layers.Dense(cases.CLASSES)]
        return cases.compiled(
            keras.Sequential([keras.Input((cases.FEATURES,)), *layers]), cases.adam()
        )

    net = built(model, backend, spec_of(rows))
    for number, layer in enumerate(net.layers):
        paths = [f"_{v.path.replace('/', '_')}_" for v in layer.variables]
        kept = [
            v
            for v in net.optimizer.variables
            if any(path in f"_{v.path.split('/')[-1]}_" for path in paths)
        ]
        assert len(kept) == 4
        for variable in [*layer.variables, *kept]:
            assert variable.value.device.endswith(f"CPU:{number}")
    step = PartitionedStep(get_prepared(net), backend, spec_of(rows))
    made = step._run.get_concrete_function()
    for graph in (step.graph, made.graph):
        products = [
            op.device.lower() for op in graph.get_operations() if op.type == "MatMul"
        ]
        # For each: forward, the gradient of its weights, and except for the first the
        # gradient of its inputs.
        for number, count in enumerate((2, 3, 3, 3)):
            assert sum(d.endswith(f"cpu:{number}") for d in products) == count
    step(own_part(rows, backend), 0)


def test_the_largest_share_is_smallest():
    """The test compares it with all ways to cut."""
    rng = np.random.default_rng(0)
    for parts in (1, 2, 3, 8):
        sizes = rng.integers(0, 20, 8).tolist()

        def largest(ends, sizes=sizes):
            starts = [0, *ends[:-1]]
            return max(sum(sizes[s:e]) for s, e in zip(starts, ends, strict=True))

        ways = [[*w, 8] for w in itertools.combinations(range(1, 8), parts - 1)]
        ends = layer_placement.cut_into_runs(sizes, parts)
        assert ends in ways and largest(ends) == min(map(largest, ways))


REFUSED = {
    "has 2 layers, fewer than the 3": {},
    "calls its layers in Python": {"model": cases.subclassed},
    "built already": {"model": small.model(), "built": True},
    "shard_optimizer=True does not work with layers on several": {
        "shard_optimizer": True
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_what_cannot_be_placed(message):
    options = dict(REFUSED[message])
    model = options.pop("model", small.model())()
    if options.pop("built", False):
        model.optimizer.build(model.trainable_variables)
    data = cases.labelled(np.random.default_rng(0), 20, 0)[:2]
    if message != "calls its layers in Python":
        data = small.rows(20)
    with pytest.raises(UsageError, match=message) as caught:
        small.train(on_devices(3), model=model, data=data, **options)
    assert caught.value.exit_code == 2
