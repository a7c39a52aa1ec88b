"""Models of activations, regularizers, constraints and random functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
from keras import layers

from tests.keras_coverage.case import Case, signed
from tests.keras_coverage.layers import case

_MADE_OF_NAMES = dict.fromkeys(
    ["serialize", "deserialize", "get"], "writes or reads a description"
)

# --- activations -------------------------------------------------------------------

_ACTIVATIONS = """celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish
hard_tanh leaky_relu linear log_sigmoid log_softmax mish relu relu6 selu sigmoid silu
soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid sparsemax squareplus swish
tanh tanh_shrink threshold"""


def _activation(name: str) -> Case:
    def call() -> Any:
        function = getattr(keras.activations, name)
        if name == "threshold":
            return layers.Lambda(lambda x: function(x, 0.1, 0.3))
        # The output of glu has half the width, which a layer does not expect.
        if name == "glu":
            return layers.Lambda(function)
        return layers.Activation(function)

    def wide() -> Any:
        activation = call()
        return lambda x: activation(layers.Dense(4)(x))

    return case(wide, signed(4))


ACTIVATIONS = {
    name: _activation(name)
    for name in _ACTIVATIONS.split()
    if hasattr(keras.activations, name)
}
NO_ACTIVATIONS = _MADE_OF_NAMES

# --- regularizers and constraints --------------------------------------------------


def _dense(**options: Callable[[], Any]) -> Case:
    return case(
        lambda: layers.Dense(3, **{k: make() for k, make in options.items()}), signed(4)
    )


REGULARIZERS = {
    name: _dense(
        kernel_regularizer=lambda name=name: getattr(keras.regularizers, name)()
    )
    for name in [
        "L1",
        "L1L2",
        "L2",
        "OrthogonalRegularizer",
        "l1",
        "l1_l2",
        "l2",
        "orthogonal_regularizer",
    ]
}
for _name in ("OrthogonalRegularizer", "orthogonal_regularizer"):
    # Keras computes it only in float32.
    REGULARIZERS[_name] = replace(REGULARIZERS[_name], floatx="float32", tolerance=1e-5)
NO_REGULARIZERS = {"Regularizer": "a base class", **_MADE_OF_NAMES}

CONSTRAINTS = {
    name: _dense(kernel_constraint=lambda name=name: getattr(keras.constraints, name)())
    for name in [
        "MaxNorm",
        "MinMaxNorm",
        "NonNeg",
        "UnitNorm",
        "max_norm",
        "min_max_norm",
        "non_neg",
        "unit_norm",
    ]
}
NO_CONSTRAINTS = {"Constraint": "a base class", **_MADE_OF_NAMES}

# --- random functions --------------------------------------------------------------

_random, _ops = keras.random, keras.ops
_DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "beta": lambda x, seed: x + _random.beta(_ops.shape(x), 2.0, 3.0, seed=seed),
    "binomial": lambda x, seed: (
        x + _random.binomial(_ops.shape(x), 5.0, 0.4, seed=seed)
    ),
    "categorical": lambda x, seed: _ops.take_along_axis(
        x, _random.categorical(x, 2, seed=seed), axis=1
    ),
    "dropout": lambda x, seed: _random.dropout(x, 0.4, seed=seed),
    "gamma": lambda x, seed: x + _random.gamma(_ops.shape(x), 2.0, seed=seed),
    "normal": lambda x, seed: x + _random.normal(_ops.shape(x), seed=seed),
    "randint": lambda x, seed: (
        x + _ops.cast(_random.randint(_ops.shape(x), 0, 5, seed=seed), x.dtype)
    ),
    "shuffle": lambda x, seed: _random.shuffle(x, seed=seed),
    "truncated_normal": lambda x, seed: (
        x + _random.truncated_normal(_ops.shape(x), seed=seed)
    ),
    "uniform": lambda x, seed: x + _random.uniform(_ops.shape(x), seed=seed),
}


class Draws(layers.Layer):
    """Draws numbers from a seed generator of its own."""

    def __init__(self, name_of_draw: str):
        super().__init__()
        self.draw = _DRAWS[name_of_draw]
        self.seed_generator = keras.random.SeedGenerator(11)

    def call(self, x: Any) -> Any:
        return self.draw(x, self.seed_generator)

    def compute_output_spec(self, x: Any) -> Any:
        width = 2 if self.draw is _DRAWS["categorical"] else x.shape[-1]
        return keras.KerasTensor((x.shape[0], width), x.dtype)


def _drawn(name: str) -> Case:
    return case(lambda: Draws(name), signed(4))


RANDOM = {name: _drawn(name) for name in _DRAWS}
RANDOM["SeedGenerator"] = _drawn("normal")
NO_RANDOM: dict[str, str] = {}

# --- optimizers and schedules ------------------------------------------------------

_OPTIMIZERS = """Adadelta Adafactor Adagrad Adam AdamW Adamax Ftrl Lamb Lion Muon Nadam
RMSprop SGD ScheduleFreeAdamW"""
_SCHEDULES = {
    "CosineDecay": {"initial_learning_rate": 0.1, "decay_steps": 4},
    "CosineDecayRestarts": {"initial_learning_rate": 0.1, "first_decay_steps": 2},
    "ExponentialDecay": {
        "initial_learning_rate": 0.1,
        "decay_steps": 2,
        "decay_rate": 0.5,
    },
    "InverseTimeDecay": {
        "initial_learning_rate": 0.1,
        "decay_steps": 2,
        "decay_rate": 0.5,
    },
    "PiecewiseConstantDecay": {"boundaries": [1], "values": [0.1, 0.05]},
    "PolynomialDecay": {"initial_learning_rate": 0.1, "decay_steps": 2},
}


def _optimized(optimizer: Callable[[], Any]) -> Case:
    def build() -> tuple[Any, Any]:
        x = keras.Input((4,))
        return x, layers.Dense(2)(layers.Dense(3, activation="tanh")(x))

    return Case(
        build, lambda rows: (signed(4)(rows), signed(2)(rows)), optimizer=optimizer
    )


def _several() -> Any:
    kind = keras.optimizers
    return kind.OptimizerMap(kind.SGD(0.05), {r".*_1.*": kind.Adam(0.05)})


OPTIMIZERS = {
    name: _optimized(lambda name=name: getattr(keras.optimizers, name)(0.05))
    for name in _OPTIMIZERS.split()
} | {
    "LossScaleOptimizer": _optimized(
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
    ),
    "OptimizerMap": _optimized(lambda: keras.optimizers.MultiOptimizer(_several())),
    "MultiOptimizer": _optimized(lambda: keras.optimizers.MultiOptimizer(_several())),
}
NO_OPTIMIZERS = {
    "Optimizer": "a base class",
    "legacy": "a module of names that raise",
    "schedules": "a module, below",
    **_MADE_OF_NAMES,
}
SCHEDULES = {
    name: _optimized(
        lambda name=name, words=words: keras.optimizers.SGD(
            getattr(keras.optimizers.schedules, name)(**words)
        )
    )
    for name, words in _SCHEDULES.items()
}
NO_SCHEDULES = {"LearningRateSchedule": "a base class", **_MADE_OF_NAMES}
