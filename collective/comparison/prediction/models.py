"""The gradients of a model, and when back-propagation has made each.

Sizes follow from the architecture. So does the share of the work of each layer: the
multiplications of its kernel at each position of its output. The seconds of a step on
one device are published ones, the user's, or measured here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collective.errors import UsageError

if TYPE_CHECKING:
    import keras

FORWARD = 1 / 3  # of a step: back-propagation takes twice as long


@dataclass(frozen=True)
class Gradient:
    """One trainable variable's."""

    bytes: int  # its size, in float32
    ready: float  # seconds from the start of a step until it is there


@dataclass(frozen=True)
class Profile:
    """A training step on one device, without communication."""

    name: str
    gradients: tuple[Gradient, ...]  # in the order in which they appear
    seconds: float
    source: str  # of the seconds

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)


Layer = tuple[list[int], float]  # bytes of its variables; its work, in any unit


def profile(name: str, layers: list[Layer], seconds: float, source: str) -> Profile:
    """Spreads the seconds of a step over layers, which are in the order of the model."""
    whole = sum(work for _, work in layers) or 1.0
    gradients, done = [], 0.0
    for sizes, work in reversed(layers):
        done += work / whole
        ready = seconds * (FORWARD + (1 - FORWARD) * done)
        gradients += [Gradient(size, ready) for size in reversed(sizes)]
    return Profile(name, tuple(gradients), seconds, source)


def layers_of(model: keras.Model) -> list[Layer]:
    """The layers of a built model that have variables or much work."""
    found = []
    for layer in model._flatten_layers(include_self=False, recursive=True):
        variables = [v for v in layer._trainable_variables]
        if not variables:
            continue
        positions = _positions(layer)
        work = sum(math.prod(v.shape) for v in variables if len(v.shape) > 1)
        sizes = [4 * math.prod(v.shape) for v in variables]
        lookup = type(layer).__name__.endswith("Embedding")
        found.append((sizes, 0.0 if lookup else float(work) * positions))
    return found


def _positions(layer: Any) -> int:
    """At how many positions of its output a kernel is applied."""
    try:
        shape = layer.output.shape
    except (AttributeError, ValueError):
        return 1  # called several times, or inside another layer
    return math.prod(n or 1 for n in shape[1:-1])


def bert_base() -> list[Layer]:
    """BERT-base with its masked-language head [Devlin et al., 2019].

    The word embedding is also the last matrix, so its gradient appears last of all.
    """
    width, hidden, words, positions = 768, 3072, 30_522, 512

    def dense(inputs: int, outputs: int) -> Layer:
        return [4 * inputs * outputs, 4 * outputs], float(inputs * outputs)

    norm: Layer = ([4 * width, 4 * width], 0.0)
    block = [*[dense(width, width)] * 4, norm]
    block += [dense(width, hidden), dense(hidden, width), norm]
    embedding: Layer = ([4 * width * n for n in (words, positions, 2)], 0.0)
    head: Layer = ([4 * words], float(width * words))
    return [embedding, norm, *block * 12, dense(width, width), norm, head]


def _application(name: str) -> Callable[[], list[Layer]]:
    def layers() -> list[Layer]:
        import keras

        return layers_of(getattr(keras.applications, name)(weights=None))

    return layers


# Samples a second and the batch of one device.
TENSORFLOW = (
    "assumed: one P100, synthetic data, batch 64, by TensorFlow's benchmarks of May 2017 "
    "(tensorflow.org/performance/benchmarks)"
)
PUBLISHED: dict[str, tuple[Callable[[], list[Layer]], int, float, str]] = {
    "resnet50": (_application("ResNet50"), 64, 219.0, TENSORFLOW),
    "resnet101": (
        _application("ResNet101"),
        64,
        129.5,
        "assumed: between ResNet-50 and ResNet-152 by their multiplications; "
        + TENSORFLOW.removeprefix("assumed: "),
    ),
    "vgg16": (_application("VGG16"), 64, 154.0, TENSORFLOW),
    "bert-base": (
        bert_base,
        32,
        112.76,
        "assumed: one V100, float32, batch 32, by OneFlow's DLPerf of NVIDIA's "
        "TensorFlow BERT",
    ),
}


def published(name: str, seconds: float | None = None) -> Profile:
    """One of ``PUBLISHED``; with the user's seconds of a step, if given."""
    layers, batch, rate, source = PUBLISHED[name]
    if seconds is not None:
        return profile(name, layers(), seconds, "as given")
    return profile(name, layers(), batch / rate, source)


def of_model(
    name: str, model: keras.Model, rows: int, seconds: float | None
) -> Profile:
    """A user's model; its step is measured on this device if no seconds are given.

    Raises:
        UsageError: If the model is not built, or nothing of it is trainable.
    """
    layers = layers_of(model)
    if not layers:
        raise UsageError(
            f"the model {name} has no trainable variables, so nothing is summed",
            hint="build it: begin it with keras.Input(shape)",
        )
    if seconds is not None:
        return profile(name, layers, seconds, "as given")
    return profile(name, layers, measured(model, rows), f"measured here, {rows} rows")


def measured(model: keras.Model, rows: int) -> float:
    """Seconds of a forward and backward pass on this device: the best of three."""
    import keras
    import tensorflow as tf

    inputs = [
        keras.random.uniform([rows, *one.shape[1:]], 0, 2, dtype="float32")
        for one in model.inputs
    ]
    data = [
        keras.ops.cast(one, spec.dtype)
        for one, spec in zip(inputs, model.inputs, strict=True)
    ]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            outputs = model(data if len(data) > 1 else data[0], training=True)
            loss = tf.add_n([tf.reduce_sum(one) for one in tf.nest.flatten(outputs)])
        variables = [v.value for v in model.trainable_variables]
        gradients = [g for g in tape.gradient(loss, variables) if g is not None]
        return tf.add_n([tf.reduce_sum(g) for g in gradients])

    step().numpy()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step().numpy()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
