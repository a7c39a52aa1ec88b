"""Cases with equal results for every sum of gradients: models, data, settings.

All are tiny: a case costs its tracing, not its arithmetic. The rows of every batch are
random, so that ranks never hold the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.fit_options import FitOptions
from collective.training import keras_compat
from collective.training.input.pipeline import Batch, share
from collective.training.loop.position import Position
from collective.training.observers.desync import DesyncAlarm
from collective.training.preparation.prepare import prepare
from tests.training.by_hand import Steps

STEPS = 30
FEATURES, CLASSES, WORDS, LENGTH = 8, 3, 11, 5

Rows = tuple[Any, Any, Any]


def labelled(rng: np.random.Generator, rows: int, step: int) -> Rows:
    x = rng.normal(size=(rows, FEATURES)).astype(keras.config.floatx())
    return x, rng.integers(0, CLASSES, rows).astype("int32"), None


def weighted(rng: np.random.Generator, rows: int, step: int) -> Rows:
    x, y, _ = labelled(rng, rows, step)
    weight = rng.exponential(size=rows) * (rng.random(rows) < 0.7)
    weight[-1] = 3.0  # at least one row of a batch counts
    return x, y, weight.astype(keras.config.floatx())


def binary(rng: np.random.Generator, rows: int, step: int) -> Rows:
    x, y, _ = labelled(rng, rows, step)
    return x, (y[:, None] > 0).astype(keras.config.floatx()), None


def sentences(rng: np.random.Generator, rows: int, step: int) -> Rows:
    """Return sequences of very unequal length, ended by zeros, with repeated words."""
    words = rng.integers(1, WORDS, (rows, LENGTH))
    lengths = rng.integers(1, LENGTH + 1, rows)
    words[np.arange(LENGTH) >= lengths[:, None]] = 0
    return words.astype("int32"), rng.integers(0, CLASSES, words.shape), None


def repeated(rng: np.random.Generator, rows: int, step: int) -> Rows:
    """Return few words, so that every batch looks up the same row many times."""
    words = rng.integers(0, 4, (rows, LENGTH)).astype("int32")
    return words, rng.integers(0, CLASSES, rows), None


def two_and_two(rng: np.random.Generator, rows: int, step: int) -> Rows:
    x, y, _ = labelled(rng, rows, step)
    target = rng.normal(size=(rows, 2)).astype(x.dtype)
    return {"wide": x, "narrow": x[:, :2] ** 2}, {"kind": y, "size": target}, None


def overflowing(rng: np.random.Generator, rows: int, step: int) -> Rows:
    """Return rows as ``labelled`` does, but one row of step 4 is infinite, on one replica."""
    x, y, _ = labelled(rng, rows, step)
    if step == 4:
        x[-1, 0] = np.inf
    return x, y, None


# --- models ---------------------------------------------------------------------


def compiled(model: keras.Model, optimizer: Any, **compile_arguments: Any) -> Any:
    arguments = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    model.compile(optimizer, **(arguments | compile_arguments))
    return model


def mlp(
    optimizer: Callable[[], Any], reduction: str = "sum_over_batch_size"
) -> Callable[[], Any]:
    """Return a maker of the two-layer network of most cases."""

    def make() -> keras.Model:
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(CLASSES),
        ]
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=reduction
        )
        return compiled(
            keras.Sequential(layers),
            optimizer(),
            loss=loss,
            weighted_metrics=[
                keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
            ],
        )

    return make


def sgd() -> keras.Optimizer:
    return keras.optimizers.SGD(0.1)


def epsilon() -> float:
    """Return Adam's epsilon, larger in float32.

    Adam divides a gradient by its own size. If rows cancel (a bias), little more than
    rounding is left of the gradient, and with 1e-7 that becomes a full step: with AdamW,
    biases ended 1.1e-6 apart on two replicas (and within 1e-12 in float64).
    """
    return 1e-7 if keras.config.floatx() == "float64" else 1e-3


def adam() -> keras.Optimizer:
    return keras.optimizers.Adam(0.01, epsilon=epsilon())


def masked() -> keras.Model:
    layers = [
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(WORDS, 8, mask_zero=True),
        keras.layers.Dense(CLASSES),
    ]
    return compiled(keras.Sequential(layers), sgd(), weighted_metrics=["accuracy"])


def with_repeats() -> keras.Model:
    layers = [
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(WORDS, 4),
        keras.layers.Flatten(),
        keras.layers.Dense(CLASSES),
    ]
    return compiled(keras.Sequential(layers), adam())


class AddsLoss(keras.layers.Layer):
    """Adds the mean of its input's squares to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.03 * keras.ops.mean(x**2))
        return x


def activity_regularizer() -> keras.regularizers.Regularizer | None:
    """Return None for Keras before 3.14, which sums its values over rows: it is refused."""
    regularizer = keras.regularizers.L2(0.01)
    layer = keras.layers.Activation("linear", activity_regularizer=regularizer)
    layer(np.ones((2, 1)))
    return regularizer if float(layer.losses[0]) < 0.015 else None


def regularised() -> keras.Model:
    """Return a model with every way to add to the loss, parts that must count once."""
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(
            16,
            "tanh",
            kernel_regularizer=keras.regularizers.L2(0.05),
            activity_regularizer=activity_regularizer(),
        ),
        AddsLoss(),
        # Replaces L1, which Keras 3.12, the last for Python 3.10, lacks in float64.
        keras.layers.Dense(CLASSES, bias_regularizer=keras.regularizers.L1L2(l1=0.01)),
    ]
    return compiled(keras.Sequential(layers), sgd())


def functional() -> keras.Model:
    """Return a model of two inputs, two outputs, two losses of unequal weight."""
    wide, narrow = (
        keras.Input((FEATURES,), name="wide"),
        keras.Input((2,), name="narrow"),
    )
    hidden = keras.layers.Dense(16, activation="tanh")(wide)
    hidden = keras.layers.Concatenate()([hidden, narrow])
    outputs = {
        "kind": keras.layers.Dense(CLASSES, name="kind")(hidden),
        "size": keras.layers.Dense(2, name="size")(hidden),
    }
    return compiled(
        keras.Model({"wide": wide, "narrow": narrow}, outputs),
        adam(),
        loss={
            "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "size": "mse",
        },
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )


class Subclassed(keras.Model):
    """Has an argument ``training``, and a layer without effect on the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(16, activation="tanh")
        self.unused = keras.layers.Dense(2)
        self.out = keras.layers.Dense(CLASSES)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.hidden(x)
        self.unused(hidden)
        return self.out(hidden * 2 if training else hidden)


def subclassed() -> keras.Model:
    return compiled(Subclassed(), adam())


def classifier() -> keras.Model:
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")]
    return compiled(
        keras.Sequential(layers),
        sgd(),
        loss="binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(num_thresholds=50, name="auc")],
    )


def loss_scaled() -> keras.Optimizer:
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        initial_scale=1024.0,
        dynamic_growth_steps=8,
    )


def normalised() -> keras.Model:
    """Return a model without a bias before BatchNorm, whose gradient would be rounding.

    The epsilon is large, because a replica has two or three rows here. If they are nearly
    equal, BatchNorm divides by almost nothing, and a sum in another order (Horovod's, or
    MPI's on four ranks) ended 2.2e-5 apart in float32; within 1e-12 in float64.
    """
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(16, use_bias=False),
        keras.layers.BatchNormalization(momentum=0.9, epsilon=0.1),
        keras.layers.ReLU(),
        keras.layers.Dense(CLASSES),
    ]
    return compiled(keras.Sequential(layers), sgd())


def dropped() -> keras.Model:
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dropout(0.4),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.GaussianNoise(0.3),
        keras.layers.Dense(CLASSES),
    ]
    return compiled(keras.Sequential(layers), sgd())


# --- the table ------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One training with the same result everywhere.

    Attributes:
        name: Its name in pytest.
        model: Makes the compiled model.
        data: Makes the rows of a global batch.
        rows: Sizes of the global batches, taken in turn.
        accumulate: Micro-batches of an update.
        replicas_matter: Whether the result necessarily depends on the number of replicas
            (batch statistics, masks); it is compared only at equal numbers.
    """

    name: str
    model: Callable[[], Any]
    data: Callable[[np.random.Generator, int, int], Rows] = labelled
    rows: tuple[int, ...] = (10, 10, 7)
    accumulate: int = 1
    replicas_matter: bool = False

    def batch(self, step: int) -> Rows:
        rows = self.rows[step % len(self.rows)]
        return self.data(np.random.default_rng([7, step]), rows, step)


def clipped(**how: float) -> Callable[[], Any]:
    return mlp(lambda: keras.optimizers.SGD(0.1, **how))


CASES = (
    Case("sgd", mlp(sgd), rows=(12,)),
    Case(
        "momentum",
        mlp(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)),
    ),
    Case("adam", mlp(adam)),
    Case(
        "adamw-ema",
        mlp(
            lambda: keras.optimizers.AdamW(
                0.01,
                epsilon=epsilon(),
                weight_decay=0.05,
                use_ema=True,
                ema_momentum=0.8,
                ema_overwrite_frequency=4,
            )
        ),
    ),
    Case("clipnorm", clipped(clipnorm=0.1)),
    Case("clipvalue", clipped(clipvalue=0.02)),
    Case("global-clipnorm", clipped(global_clipnorm=0.1)),
    Case("empty-replica", mlp(adam), rows=(10, 3, 1)),
    Case("accumulate", mlp(adam), rows=(11, 11, 5), accumulate=3),
    Case("accumulate-empty-replica", mlp(sgd), rows=(11, 2, 1), accumulate=3),
    Case("sample-weight", mlp(sgd), weighted),
    Case("weighted-mean", mlp(sgd, "mean_with_sample_weight"), weighted, accumulate=2),
    Case("summed-loss", mlp(lambda: keras.optimizers.SGD(0.01), "sum"), weighted),
    Case("masked", masked, sentences, rows=(10, 7, 3)),
    Case("masked-accumulate", masked, sentences, rows=(10, 3), accumulate=3),
    Case("regularised", regularised, rows=(10, 3)),
    Case("embedding", with_repeats, repeated),
    Case("two-inputs-two-outputs", functional, two_and_two, accumulate=2),
    Case("subclassed", subclassed),
    Case("loss-scaling", mlp(loss_scaled), overflowing, rows=(10,)),
    Case("auc", classifier, binary, rows=(10, 7, 3)),
    Case("batchnorm", normalised, rows=(12, 9), replicas_matter=True),
    Case(
        "batchnorm-accumulate",
        normalised,
        rows=(24, 13, 3),
        accumulate=3,
        replicas_matter=True,
    ),
    Case("dropout", dropped, rows=(10, 7, 3), replicas_matter=True),
    Case("dropout-accumulate", dropped, accumulate=3, replicas_matter=True),
)
PRECISIONS = ("float64", "float32")
# Tolerances, relative to the largest entry of each tensor.
TOLERANCE = {"float64": 1e-12, "float32": 1e-6}


# --- running one ----------------------------------------------------------------


def spec_of(rows: Rows) -> Batch:
    """Return the specification of batches that look like these rows."""

    def spec(leaf: Any) -> Any:
        return (
            None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        )

    parts = (tf.nest.map_structure(spec, part) for part in rows)
    return Batch(*parts, tf.TensorSpec([], tf.int64))


def own_part(rows: Rows, backend: Any) -> Batch:
    """Return this process' part of a global batch."""
    total = len(tf.nest.flatten(rows[0])[0])
    start, _ = share(total, backend.local_replicas[0], backend.replicas)
    _, stop = share(total, backend.local_replicas[-1], backend.replicas)

    def cut(leaf: Any) -> Any:
        return None if leaf is None else tf.constant(leaf[start:stop])

    parts = (tf.nest.map_structure(cut, part) for part in rows)
    return Batch(*parts, tf.constant(total, tf.int64))


def built(make: Callable[[], Any], backend: Any, spec: Batch) -> keras.Model:
    """Return a model with all its variables, the same on every rank."""
    with backend.scope():
        keras.utils.set_random_seed(0)
        model = make()
    prepare(model, backend, spec)
    return model


def train(
    case: Case,
    backend: Any,
    precision: str,
    accumulate: int | None = None,
    check_every: int = 0,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Train and return all values to compare.

    Args:
        case: The case to train.
        backend: The backend that sums.
        precision: ``float64`` or ``float32``.
        accumulate: Micro-batches, if they differ from the case.
        check_every: Steps between comparisons of the replicas.
        options: Further options of ``FitOptions``.

    Returns:
        Losses, logs, and every variable of model and optimizer.
    """
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(precision)
    spec = spec_of(case.batch(0))
    model = built(case.model, backend, spec)
    words = {"accumulate": accumulate or case.accumulate} | options
    step = Steps(model, backend, FitOptions(**words), seed=3)
    alarm = None
    if DesyncAlarm.is_needed(backend, check_every):
        alarm = DesyncAlarm(Position(model, backend), check_every)
    for number in range(STEPS):
        if alarm is not None:
            alarm.before_input(number)
        step(own_part(case.batch(number), backend))
    result = {"losses": np.array(step.losses)}
    for name, value in keras_compat.data.as_numbers(step.returned).items():
        result[f"log {name}"] = np.array(value)
    for kind, variables in (
        ("trainable", model.trainable_variables),
        ("state", model.non_trainable_variables),
        ("optimizer", model.optimizer.variables),
    ):
        for i, variable in enumerate(variables):
            result[f"{kind} {i} {variable.path}"] = np.array(variable)
    return result


def differences(
    got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], precision: str
) -> list[str]:
    """Return differences beyond rounding, the worst first; empty if all is equal."""
    assert list(got) == list(wanted)
    found = []
    for name, reference in wanted.items():
        value = got[name]
        assert value.shape == reference.shape and value.dtype == reference.dtype
        finite = np.isfinite(reference)
        if not np.array_equal(finite, np.isfinite(value)):
            found.append((np.inf, name))
            continue
        error = np.abs(np.where(finite, value, 0) - np.where(finite, reference, 0.0))
        largest = np.abs(np.where(finite, reference, 0)).max(initial=0)
        relative = error.max(initial=0) / (largest or 1)
        if relative > TOLERANCE[precision]:
            found.append((float(relative), name))
    return [f"{name}: {error:.2g} relative" for error, name in sorted(found)[::-1]]
