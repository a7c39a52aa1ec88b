"""Models of every layer of ``keras.layers``."""

from __future__ import annotations

import inspect
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests import launch
from tests.keras_coverage.case import (
    Case,
    below,
    between,
    signed,
)

Call = Callable[[Any], Any]

# Shapes of a row for layers without a shape in their name.
_FEATURES = """Activation ActivityRegularization AlphaDropout BatchNormalization Dense Dropout
ELU GaussianDropout GaussianNoise Identity LayerNormalization LeakyReLU PReLU RMSNormalization
ReLU RepeatVector Softmax UnitNormalization Flatten"""
_SEQUENCES = """GRU LSTM SimpleRNN Masking Permute Reshape GroupNormalization"""
# Layers without float64 in TensorFlow or Keras: these are compared in float32.
_SINGLE = [
    "AdaptiveAveragePooling3D",
    "AdaptiveMaxPooling3D",
    "AugMix",
    "AveragePooling3D",
    "MaxPooling3D",
    "MelSpectrogram",
    "RandAugment",
    "RandomRotation",
]
_IMAGES = """AugMix AutoContrast CenterCrop ContrastLimitedAdaptiveHistogramEqualization CutMix
Equalization MixUp RandAugment RandomBrightness RandomColorDegeneration RandomColorJitter
RandomContrast RandomCrop RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur
RandomGrayscale RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation
RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom Rescaling Resizing
Solarization"""
_BY_DIMENSION = """AdaptiveAveragePooling AdaptiveMaxPooling AveragePooling Conv ConvTranspose
Cropping DepthwiseConv GlobalAveragePooling GlobalMaxPooling MaxPooling SeparableConv
SpatialDropout UpSampling ZeroPadding ConvLSTM"""
_MERGES = """Add Average Concatenate Dot Maximum Minimum Multiply Subtract
add average concatenate dot maximum minimum multiply subtract"""

#: Objects that are not trained, and the reasons.
EXCLUDED = {
    **dict.fromkeys(["Layer", "Wrapper"], "a base class, which calls nothing"),
    "InputSpec": "describes an input",
    **dict.fromkeys(["serialize", "deserialize"], "writes or reads a description"),
    **dict.fromkeys(["JaxLayer", "FlaxLayer"], "needs JAX"),
    "TorchModuleWrapper": "needs the backend of PyTorch",
}

_SHAPES = {1: (6, 3), 2: (6, 6, 3), 3: (4, 4, 4, 3)}
_ARGUMENTS: dict[str, Any] = {
    "activation": "tanh",
    "axes": 1,
    "dims": (2, 1),
    "factor": 0.4,
    "filters": 2,
    "height": 4,
    "height_factor": 0.2,
    "kernel_size": 2,
    "n": 3,
    "output_size": 2,
    "pool_size": 2,
    "rate": 0.4,
    "scale": 0.5,
    "stddev": 0.3,
    "target_shape": (3, 5),
    "units": 3,
    "width": 4,
    "width_factor": 0.2,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "ActivityRegularization": {"l1": 0.1, "l2": 0.1},
    "GroupNormalization": {"groups": 3},
    "RandomColorJitter": dict.fromkeys(
        ["brightness_factor", "contrast_factor", "saturation_factor", "hue_factor"], 0.3
    ),
    "RandomPosterization": {"factor": 4},
    "RandomShear": {"x_factor": 0.2, "y_factor": 0.2},
    "Solarization": {"threshold_factor": 0.5, "value_range": (0, 1)},
}
# Augmentations with value_range, whose images lie in that range.
_RANGE = (0, 1)


def made(name: str, *words: Any, **options: Any) -> Any:
    """Return a layer, with the arguments that it needs."""
    kind = getattr(layers, name)
    options = _OPTIONS.get(name, {}) | options
    taken = list(inspect.signature(kind.__init__).parameters.values())[1:]
    for parameter in taken[len(words) :]:
        plain = parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if plain and parameter.default is parameter.empty:
            options.setdefault(parameter.name, _ARGUMENTS.get(parameter.name))
        if parameter.name == "value_range":
            options.setdefault("value_range", _RANGE)
        if parameter.name == "seed":
            options.setdefault("seed", 7)
    options = {k: v for k, v in options.items() if v is not None}
    return kind(*words, **options)


def case(
    call: Callable[[], Call],
    data: Callable[[int], Any],
    *,
    dtype: str | None = None,
    before: bool = True,
) -> Case:
    """Return a model with a call between two layers with weights.

    Args:
        call: Makes the called object, a new one for each model.
        data: Makes the rows.
        dtype: The dtype of an input that is not a number.
        before: Whether a layer with weights precedes it.
    """

    def build() -> tuple[Any, Any]:
        x = data(2)
        of_rows = keras.Input(x.shape[1:], dtype=dtype or str(x.dtype))
        hidden = of_rows
        if before:
            hidden = layers.Dense(3, activation="tanh")(hidden)
        return of_rows, _head(call()(hidden))

    return Case(build, lambda rows: (data(rows), signed(2)(rows)))


def _head(found: Any) -> Any:
    """Return the outputs of the model, given any result of a layer."""
    parts = []
    for part in keras.tree.flatten(found):
        if "int" in str(part.dtype) or "bool" in str(part.dtype):
            part = layers.Embedding(40, 3)(part)
        if "complex" in str(part.dtype):
            part = keras.ops.abs(part)
        parts.append(layers.Flatten()(part) if len(part.shape) != 2 else part)
    return layers.Dense(2)(parts[0] if len(parts) == 1 else layers.Concatenate()(parts))


def _alone(name: str, shape: tuple[int, ...], **more: Any) -> Case:
    return case(lambda: made(name), signed(*shape), **more)


def _merge(name: str) -> Case:
    def call() -> Call:
        merge = getattr(layers, name)
        options = {"axes": 1} if name.lower() == "dot" else {}

        def both(x: Any) -> Any:
            pair = [layers.Dense(3)(x), layers.Dense(3)(x)]
            return (
                merge(**options)(pair) if name[0].isupper() else merge(pair, **options)
            )

        return both

    return case(call, signed(4))


def _attention(name: str, **options: Any) -> Case:
    def call() -> Call:
        layer = getattr(layers, name)(**options)
        pair = name in ("Attention", "AdditiveAttention")
        return lambda x: layer([x, x]) if pair else layer(x, x)

    return case(call, signed(5, 3))


def _words(rows: int) -> tf.Tensor:
    words = np.array(["tree", "house", "river", "sky", "unknown"])
    return tf.constant(words[below(5, 3)(rows)])


def _sentences(rows: int) -> tf.Tensor:
    return tf.strings.reduce_join(_words(rows), 1, keepdims=True, separator=" ")


_VOCABULARY = ["tree", "house", "river", "sky"]


def _saved_model() -> Call:
    """Return a saved model, which rank 0 writes before the others reach this line."""
    folder = Path(os.environ.get(launch.REFERENCE, tempfile.gettempdir()), "saved")
    if not folder.exists():
        _save(folder)
    return layers.TFSMLayer(str(folder), call_endpoint="serve", trainable=False)


def _save(folder: Path) -> None:
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(3, activation="tanh")])
    inner.export(str(folder), verbose=False)


class _AugMix(layers.AugMix):
    """Draws the same each time; Keras draws with Python's ``random`` while it traces."""

    def get_random_transformation(self, *data: Any, **options: Any) -> Any:
        random.seed(3)
        return super().get_random_transformation(*data, **options)


def _boxes() -> Call:
    layer = layers.MaxNumBoundingBoxes(max_number=4, bounding_box_format="xyxy")

    def call(x: Any) -> Any:
        images = layers.Reshape((2, 2, 3))(x)
        boxes = {"boxes": layers.Reshape((3, 4))(x), "labels": x[:, :3]}
        return layer({"images": images, "bounding_boxes": boxes})["bounding_boxes"][
            "boxes"
        ]

    return call


def _explicit() -> dict[str, Case]:
    sequence, image = signed(5, 3), between(0, 1, 6, 6, 3)
    rnn = lambda *names: lambda: layers.RNN([made(n) for n in names])  # noqa: E731
    return {
        "AdditiveAttention": _attention("AdditiveAttention"),
        "Attention": _attention("Attention"),
        "AugMix": case(lambda: _AugMix(_RANGE, seed=7), image, before=False),
        "Bidirectional": case(lambda: layers.Bidirectional(layers.LSTM(3)), sequence),
        "CategoryEncoding": case(
            lambda: layers.CategoryEncoding(6), below(6, 3), before=False
        ),
        "Discretization": case(
            lambda: layers.Discretization([-1.0, 0.0, 1.0]), signed(4), before=False
        ),
        "EinsumDense": case(
            lambda: layers.EinsumDense("abc,cd->abd", (5, 4), bias_axes="d"),
            sequence,
        ),
        "Embedding": case(lambda: layers.Embedding(7, 3), below(7, 4), before=False),
        "GRUCell": case(rnn("GRUCell"), sequence),
        "GroupQueryAttention": _attention(
            "GroupQueryAttention", head_dim=2, num_query_heads=4, num_key_value_heads=2
        ),
        "HashedCrossing": case(
            lambda: lambda x: layers.HashedCrossing(20)((x[:, 0], x[:, 1])),
            below(9, 2),
            before=False,
        ),
        "Hashing": case(lambda: layers.Hashing(20), below(9, 3), before=False),
        "Input": _alone("Identity", (4,)),
        "InputLayer": _alone("Identity", (4,)),
        "IntegerLookup": case(
            lambda: layers.IntegerLookup(vocabulary=[1, 3, 4]),
            below(6, 3),
            before=False,
        ),
        "LSTMCell": case(rnn("LSTMCell"), sequence),
        "Lambda": case(lambda: layers.Lambda(lambda x: x * x), signed(4)),
        "MaxNumBoundingBoxes": case(_boxes, between(0, 1, 12), before=False),
        "MelSpectrogram": case(
            lambda: made(
                "MelSpectrogram",
                fft_length=8,
                sequence_stride=4,
                sequence_length=8,
                num_mel_bins=3,
            ),
            signed(32),
            before=False,
        ),
        "MultiHeadAttention": _attention("MultiHeadAttention", num_heads=2, key_dim=2),
        "Normalization": case(
            lambda: layers.Normalization(mean=0.3, variance=2.0), signed(4)
        ),
        "Pipeline": case(
            lambda: layers.Pipeline([made("RandomFlip"), made("RandomZoom")]),
            image,
            before=False,
        ),
        "RNN": case(rnn("SimpleRNNCell"), sequence),
        "RandomCrop": case(
            lambda: lambda x: layers.GlobalAveragePooling2D()(made("RandomCrop")(x)),
            image,
            before=False,
        ),
        "ReversibleEmbedding": case(_reversible, below(7, 4), before=False),
        "STFTSpectrogram": case(
            lambda: layers.STFTSpectrogram(
                frame_length=8, frame_step=4, fft_length=8, mode="magnitude"
            ),
            signed(32, 1),
            before=False,
        ),
        "SimpleRNNCell": case(rnn("SimpleRNNCell"), sequence),
        "SpectralNormalization": case(
            lambda: layers.SpectralNormalization(layers.Dense(3)), signed(4)
        ),
        "StackedRNNCells": case(rnn("GRUCell", "SimpleRNNCell"), sequence),
        "StringLookup": case(
            lambda: layers.StringLookup(vocabulary=_VOCABULARY),
            _words,
            dtype="string",
            before=False,
        ),
        "TFSMLayer": case(_saved_model, signed(4)),
        "TextVectorization": case(
            lambda: layers.TextVectorization(
                vocabulary=_VOCABULARY, output_sequence_length=4
            ),
            _sentences,
            dtype="string",
            before=False,
        ),
        "TimeDistributed": case(
            lambda: layers.TimeDistributed(layers.Dense(3)), sequence
        ),
    }


def _reversible() -> Call:
    layer = layers.ReversibleEmbedding(7, 3)
    return lambda x: layer(layer(x), reverse=True)


def _all() -> dict[str, Case]:
    found = {name: _alone(name, (4,)) for name in _FEATURES.split()}
    found |= {name: _alone(name, (5, 3)) for name in _SEQUENCES.split()}
    for kind in _BY_DIMENSION.split():
        name, transpose, _ = kind.partition("Transpose")
        for rank, shape in _SHAPES.items():
            of_time = (2,) if kind == "ConvLSTM" else ()
            full = f"{name}{rank}D{transpose}"
            found[full] = _alone(full, (*of_time, *shape))
    for name in _IMAGES.split():
        images = between(0, 1, 6, 6, 3)
        found[name] = case(lambda name=name: made(name), images, before=False)
    del found["RandomCrop"]  # it follows below
    found |= {name: _merge(name) for name in _MERGES.split()}
    found |= _explicit()
    return {
        name: replace(one, tolerance=1e-5, floatx="float32") if name in _SINGLE else one
        for name, one in found.items()
        if hasattr(layers, name)
    }


CASES = _all()
