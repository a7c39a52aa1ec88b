"""Whole training steps of Keras on meshes, all replicas in this process, beside stock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.training import keras_compat
from collective.training.partition.layouts import Sharded
from collective.training.partition.mesh.layouts import Mesh, resolve
from tests.training.partition.meshed import (
    OnePass,
    OverRows,
    assert_close,
    joined,
    piece,
)
from tests.training.partition.operands import left_out

L = keras.layers
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4)]
STEPS = 3


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def slots_of(optimizer: Any, variables: Any) -> list[tuple[Any, Any]]:
    """Build an optimizer, and return its slots, each with its weight."""
    found: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def of_optimizer(weight: Any) -> Any:
        before = len(optimizer.variables)
        yield
        if weight is not None:
            found.extend((slot, weight) for slot in optimizer.variables[before:])

    @contextlib.contextmanager
    def of_layer(layer: Any) -> Any:
        yield lambda variable: None

    with keras_compat.held_parts.owners_seen(of_layer, of_optimizer):
        optimizer.build(variables)
    return found


class Trained:
    """A model trained by its own ``train_step``, as it is and on a mesh.

    Args:
        model: Compiled.
        layout_map: By pattern, the axes of a variable.
        mesh: Ranks of the batch, and of the model axis.
    """

    def __init__(
        self, model: Any, x: Any, y: Any, layout_map: Any, mesh: tuple[int, int]
    ):
        replicas, places = mesh
        devices = keras.distribution.DeviceMesh(
            mesh, ["batch", "model"], [f"cpu:{i}" for i in range(replicas * places)]
        )
        layouts = keras.distribution.LayoutMap(devices)
        for pattern, axes in layout_map.items():
            layouts[f".*{pattern}"] = axes
        slots = slots_of(model.optimizer, model.trainable_variables)
        found = resolve(model, layouts, Mesh.of(devices))
        assert not found.kept_whole and not found.unmatched
        pairs = [(v, found.of(v)) for v in model.variables]
        pairs += [(slot, found.of(weight)) for slot, weight in slots]
        specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in (x, y)]

        def step(x: Any, y: Any) -> Any:
            return [tf.identity(t) for t in tf.nest.flatten(model.train_step((x, y)))]

        step(tf.constant(x), tf.constant(y))  # metrics are made in the first
        stock = tf.function(step, autograph=False).get_concrete_function(*specs)
        cut: list[tuple[tf.Variable, Sharded, list[tf.Variable]]] = []
        for variable, layout in pairs:
            if "model" in layout.cut:
                value, along = variable.value, layout.cut["model"]
                parts = [
                    tf.Variable(piece(value, along, i, places)) for i in range(places)
                ]
                cut.append((value, along, parts))
        every = {id(v): v.value for v in _variables(model)}
        before = {key: v.numpy() for key, v in every.items()}
        want = [
            [t.numpy() for t in stock(tf.constant(x), tf.constant(y))]
            for _ in range(STEPS)
        ]
        after = {key: v.numpy() for key, v in every.items()}
        for key, value in before.items():
            every[key].assign(value)
        self.cut = sum(int(np.prod(v.shape)) for v, _, _ in cut)
        self.elements = sum(int(np.prod(v.shape)) for v in every.values())
        self.model: Any = stock
        if places > 1:
            self.model = OnePass(stock, places, cut, [True, True])
        self.rows = OverRows(self.model, [True, True], replicas, len(x))
        share = len(x) // (replicas + 1)
        counts = [share] * (replicas - 1) + [len(x) - share * (replicas - 1)]
        for number, results in enumerate(want):
            got = self.rows(counts, [x, y])
            for a, b in zip(results, got, strict=True):
                assert_close(b, a, f"a result of step {number}", 1e-12)
        wholes = {id(v): joined(parts, along) for v, along, parts in cut}
        for key, variable in every.items():
            made = wholes.get(id(variable))
            made = variable.numpy() if made is None or places == 1 else made
            assert_close(made, after[key], variable.name, 1e-11)


def _variables(model: Any) -> list[Any]:
    found = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return list({id(v): v for v in found}.values())


def mlp(optimizer: Any) -> tuple[Any, ...]:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(8, activation="relu", name="up"),
            L.Dense(4, name="down"),
            L.Dense(1, name="out"),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(10, 6))
    layouts = {
        "up/kernel": (None, "model"),
        "up/bias": ("model",),
        "down/kernel": ("model", None),
    }
    return model, x, x[:, :1], layouts


def cnn(optimizer: Any) -> tuple[Any, ...]:
    # BatchNorm takes this bias away again, so its gradient is rounding alone. Adafactor
    # divides that by itself: stock Keras differs, too, for the same rows in another order.
    has_bias = not isinstance(optimizer, keras.optimizers.Adafactor)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            L.Conv2D(8, 3, name="one", use_bias=has_bias),
            L.BatchNormalization(name="norm"),
            L.ReLU(),
            L.DepthwiseConv2D(3, name="each"),
            L.MaxPooling2D(),
            L.GroupNormalization(4, name="groups"),
            L.Conv2D(4, 1, name="two"),
            L.GlobalAveragePooling2D(),
            L.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(6, 8, 8, 3))
    layouts = {
        "one/kernel": (None, None, None, "model"),
        **({"one/bias": ("model",)} if has_bias else {}),
        "(norm|groups)/.*": ("model",),
        "each/kernel": (None, None, "model", None),
        "each/bias": ("model",),
        "two/kernel": (None, None, "model", None),
    }
    return model, x, x[:, 0, 0, :1], layouts


def lstm(optimizer: Any) -> tuple[Any, ...]:
    model = keras.Sequential(
        [
            keras.Input((4, 3)),
            L.LSTM(8, name="long", return_sequences=True, use_cudnn=False),
            L.GRU(4, name="gated", use_cudnn=False),
            L.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(6, 4, 3))
    layouts = {
        "(long|gated)/.*kernel": (None, "model"),
        "long/.*/bias": ("model",),
        "gated/.*/bias": (None, "model"),
    }
    return model, x, x[:, 0, :1], layouts


def transformer(optimizer: Any) -> tuple[Any, ...]:
    inputs = keras.Input((5,), dtype="int32")
    words = L.Embedding(20, 8, name="words")
    h = words(inputs)
    n = L.LayerNormalization()(h)
    # The softmax takes a key's bias away again; see ``cnn``.
    has_bias = not isinstance(optimizer, keras.optimizers.Adafactor)
    heads = L.MultiHeadAttention(4, 2, use_bias=has_bias, name="heads")
    h = h + heads(n, n, use_causal_mask=True)
    n = L.LayerNormalization()(h)
    h = h + L.Dense(8, name="down")(L.Dense(16, activation="gelu", name="up")(n))

    class Head(L.Layer):
        """Tied to the embedding."""

        def call(self, x: Any) -> Any:
            return keras.ops.matmul(x, keras.ops.transpose(words.embeddings))

    model = keras.Model(inputs, Head()(h))
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["sparse_categorical_accuracy"],
    )
    x = np.random.default_rng(0).integers(0, 20, (6, 5)).astype("int32")
    layouts = {
        "(query|key|value)/kernel": (None, "model", None),
        **({"(query|key|value)/bias": ("model", None)} if has_bias else {}),
        "attention_output/kernel": ("model", None, None),
        "up/kernel": (None, "model"),
        "up/bias": ("model",),
        "down/kernel": ("model", None),
        "words/.*": ("model", None),
    }
    return model, x, x, layouts


def experts(optimizer: Any) -> tuple[Any, ...]:
    class Experts(L.Layer):
        def build(self, shape: Any) -> None:
            self.up = self.add_weight(shape=(4, 6, 8), name="up")
            self.down = self.add_weight(shape=(4, 8, 6), name="down")
            self.gate = self.add_weight(shape=(6, 4), name="gate")

        def call(self, x: Any) -> Any:
            shares = keras.ops.softmax(x @ self.gate)
            h = keras.ops.relu(keras.ops.einsum("bd,edh->beh", x, self.up))
            return keras.ops.einsum("beh,ehd,be->bd", h, self.down, shares)

    model = keras.Sequential([keras.Input((6,)), Experts(name="experts"), L.Dense(1)])
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(10, 6))
    return model, x, x[:, :1], {"experts/(up|down)": ("model", None, None)}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "AdamW": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "SGD": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
}
MODELS: dict[str, Callable[[Any], Any]] = {
    made.__name__: made for made in (mlp, cnn, lstm, transformer, experts)
}


CASES = [
    (model, optimizer, mesh)
    for model in MODELS
    for optimizer in OPTIMIZERS
    for mesh in MESHES
]
# Others: ``make test-equivalence``, or pytest -m matrix.
FEW = {
    ("mlp", "Adafactor", (2, 2)),
    ("cnn", "SGD", (1, 2)),
    ("lstm", "SGD", (2, 2)),
    ("transformer", "AdamW", (2, 2)),
    ("experts", "AdamW", (1, 4)),
}


@pytest.mark.parametrize(
    ("model", "optimizer", "mesh"),
    [case if case in FEW else left_out(*case) for case in CASES],
    ids=str,
)
def test_a_step_is_that_of_one_process(
    model: str, optimizer: str, mesh: tuple[int, int]
) -> None:
    made = Trained(*MODELS[model](OPTIMIZERS[optimizer]()), mesh)
    if mesh[1] == 1:
        return
    assert made.cut > 0.4 * made.elements
    assert set(made.model.fallbacks) <= (
        {"AddN", "Reshape"} if model == "lstm" else set()
    )
    if optimizer != "Adafactor":  # the factors of its slots are whole
        assert len(made.model.gathers) <= MOST_GATHERS[model], made.model.gathers
    if model == "transformer":  # Megatron's: a sum for each of four pairs, both ways
        own = optimizer == "Adafactor"  # the means over its factors are one more
        assert len(made.model.traffic.sums) <= 8 + own
    assert made.rows.traffic.gathers == []


# Of an LSTM the states, round by round, and what is written to the two slots of a whole
# kernel, whose gradient comes in parts; of experts the gradient of the whole gate.
MOST_GATHERS = {"mlp": 0, "cnn": 0, "lstm": 9, "transformer": 0, "experts": 2}
