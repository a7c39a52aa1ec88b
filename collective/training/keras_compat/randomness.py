"""Random numbers of a model: their seeds, and fixed numbers to compare steps by."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.ops import gen_random_ops

from collective.replacements import replacing

SEED_STATE = "seed_generator_state"
# Keras' own name for it; up to Keras 3.12, the last for Python 3.10, not a constant.
GLOBAL_SEED_GENERATOR = "global_seed_generator"


@contextlib.contextmanager
def global_seeds(draw: Callable[[int], tf.Tensor]) -> Iterator[None]:
    """Inside, functions of ``keras.random`` without a seed get one from ``draw``.

    Keras' global generator would be read once, when the graph is traced, and give the
    same numbers in every step.

    Args:
        draw: Returns the seed (int32, shape [2]) of the n-th such call in the graph.
    """
    calls = itertools.count()

    class Generator:
        def next(self, ordered: bool = True) -> tf.Tensor:
            return tf.cast(draw(next(calls)), keras.src.backend.random_seed_dtype())

    with replacing(seed_generator, "global_seed_generator", Generator):
        yield


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether the variable is the state of a ``keras.random.SeedGenerator``."""
    return variable.name == SEED_STATE and tuple(variable.shape) == (2,)


def global_seed_state() -> keras.Variable | None:
    """The state of the generator that ``keras.random`` uses without a seed, if any."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_global_seed_state() -> keras.Variable:
    """The same; makes the generator if there is none."""
    return seed_generator.global_seed_generator().state


@contextlib.contextmanager
def fixed_randomness() -> Iterator[list[Any]]:
    """Inside, ``keras.random`` gives the same number for every row and draws nothing.

    So does ``tf.random``. Dropout keeps all; a layer that adds noise adds a constant.

    Yields:
        The seeds that were asked for, a list that grows.
    """
    random = keras.src.backend.random
    seeds: list[Any] = []

    def fixed(value: Any) -> Any:
        def function(*args: Any, seed: Any = None, **kwargs: Any) -> Any:
            seeds.append(seed)
            return value(*args, **kwargs)

        return function

    def full(shape: Any, value: Any, dtype: Any) -> tf.Tensor:
        return tf.fill(shape, tf.cast(value, dtype or keras.config.floatx()))

    def normal(
        shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None
    ) -> Any:
        return full(shape, mean + 0.5 * stddev, dtype)

    values: dict[str, Callable[..., Any]] = {
        "normal": normal,
        "truncated_normal": normal,
        "uniform": lambda shape, minval=0.0, maxval=1.0, dtype=None: full(
            shape, minval + 0.4 * (maxval - minval), dtype
        ),
        "randint": lambda shape, minval, maxval, dtype="int32": full(
            shape, minval, dtype
        ),
        "categorical": lambda logits, num_samples, dtype="int64": tf.repeat(
            tf.argmax(logits, -1)[:, None], num_samples, 1
        ),
        "dropout": lambda inputs, rate, noise_shape=None: tf.convert_to_tensor(inputs),
        "shuffle": lambda x, axis=0: tf.convert_to_tensor(x),
        "gamma": lambda shape, alpha, dtype=None: full(shape, 1.0, dtype) * alpha,
        "binomial": lambda shape, counts, probabilities, dtype=None: (
            full(shape, 1.0, dtype) * tf.round(counts * probabilities)
        ),
        "beta": lambda shape, alpha, beta, dtype=None: (
            full(shape, 1.0, dtype)
            * tf.cast(alpha / (alpha + beta), dtype or keras.config.floatx())
        ),
    }
    # TensorFlow's own, whose arguments are a shape and what a state is made of.
    normals = lambda shape, dtype, **_: full(shape, 0.5, dtype)  # noqa: E731
    uniforms = lambda shape, dtype, **_: full(shape, 0.96875, dtype)  # noqa: E731
    operations: dict[str, Callable[..., Any]] = {
        "random_standard_normal": normals,
        "truncated_normal": normals,
        "random_uniform": uniforms,
        "random_uniform_int": lambda shape, minval, *_, **__: tf.fill(shape, minval),
        "random_shuffle": lambda value, *_, **__: tf.convert_to_tensor(value),
    }
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(replacing(random, name, fixed(value)))
        for name, value in operations.items():
            stack.enter_context(replacing(gen_random_ops, name, value))
        yield seeds


@contextlib.contextmanager
def moving_statistics(active: bool) -> Iterator[list[str]]:
    """Inside, BatchNormalization uses its moving statistics in training, if active.

    Yields:
        The names of the layers that would have used those of their replica's rows, a
        list that grows.
    """
    layer = keras.layers.BatchNormalization
    plain = layer.call
    names: list[str] = []

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        synchronized = getattr(self, "synchronized", False)
        if training and self.trainable and active and not synchronized:
            names.append(self.name)
        training = training and not active
        return plain(self, inputs, training=training, mask=mask)

    with replacing(layer, "call", call):
        yield names


_ROWS = -1  # in FixedNoise.shapes


class _At(threading.local):
    """Rows that are drawn for, and draws so far: each replica has a thread of its own."""

    def __init__(self, start: int, stop: int):
        self.start, self.stop, self.draws = start, stop, 0


class FixedNoise:
    """Draws for the rows ``start`` to ``stop`` of ``total``; eagerly only.

    A draw with as many rows as there are here gives each row the numbers that it has in
    every other cut; a draw of another shape gives one constant.
    """

    def __init__(self, start: int, stop: int, total: int):
        self.total = total
        self.normalizes = False  # whether a layer has normalized by its batch
        # Of the draws, in order; ``_ROWS`` stands for the number of rows here.
        self.shapes: list[tuple[int, ...]] = []
        self._at = _At(start, stop)

    def uniform(self, shape: Any) -> np.ndarray:
        """Numbers between 0 and 1."""
        self._at.draws += 1
        start, stop = self._at.start, self._at.stop
        sizes = [int(size) for size in np.asarray(shape).reshape(-1)]
        of_rows = bool(sizes) and sizes[0] == stop - start
        self.shapes.append((_ROWS, *sizes[1:]) if of_rows else tuple(sizes))
        if not of_rows:
            return np.full(sizes, 0.625)
        table = np.random.default_rng(self._at.draws).uniform(
            0.02, 0.98, (self.total, *sizes[1:])
        )
        return table[start:stop]

    def move(self, start: int, stop: int) -> None:
        """The next draws are the first ones of these rows."""
        self._at.start, self._at.stop, self._at.draws = start, stop, 0


_fixed: list[FixedNoise] = []


def move_noise(start: int, rows: int) -> None:
    """Inside ``fixed_noise``, the next draws are for these rows of the batch."""
    for noise in _fixed[-1:]:
        noise.move(start, start + rows)


@contextlib.contextmanager
def fixed_noise(noise: FixedNoise) -> Iterator[None]:
    """Inside, TensorFlow's random functions, which Keras' own call, draw from ``noise``.

    Dropout drops nothing, and BatchNormalization has its moving statistics.
    """

    def normal(
        shape: Any, *args: Any, mean: Any = 0.0, stddev: Any = 1.0, **kwargs: Any
    ) -> Any:
        mean, stddev = _given(args, mean, stddev)
        drawn = 3.4 * (noise.uniform(shape) - 0.5)
        return mean + stddev * tf.cast(drawn, kwargs.get("dtype") or tf.float32)

    def uniform(
        shape: Any, *args: Any, minval: Any = 0, maxval: Any = None, **kwargs: Any
    ) -> Any:
        minval, maxval = _given(args, minval, maxval)
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        maxval = 1 if maxval is None else maxval
        low, high = (tf.cast(bound, tf.float64) for bound in (minval, maxval))
        return tf.cast(low + (high - low) * noise.uniform(shape), dtype)

    def stateless(draw: Callable[..., Any]) -> Callable[..., Any]:
        """Without the seed, the second positional argument."""

        def drawn(shape: Any, *args: Any, seed: Any = None, **kwargs: Any) -> Any:
            return draw(shape, *(args if seed is not None else args[1:]), **kwargs)

        return drawn

    def unchanged(values: Any, *args: Any, **kwargs: Any) -> Any:
        return tf.identity(values)

    def moments(layer: Any, inputs: Any, mask: Any) -> Any:
        noise.normalizes = True
        return tuple(
            tf.cast(v, inputs.dtype) for v in (layer.moving_mean, layer.moving_variance)
        )

    replaced: dict[Any, dict[str, Callable[..., Any]]] = {
        tf.random: {
            "normal": normal,
            "truncated_normal": normal,
            "uniform": uniform,
            "shuffle": unchanged,
            "stateless_normal": stateless(normal),
            "stateless_truncated_normal": stateless(normal),
            "stateless_uniform": stateless(uniform),
        },
        tf.nn: {"dropout": unchanged},
        tf.nn.experimental: {"stateless_dropout": unchanged},
        keras.layers.BatchNormalization: {"_moments": moments},
    }
    with contextlib.ExitStack() as stack:
        for owner, functions in replaced.items():
            for name, function in functions.items():
                stack.enter_context(replacing(owner, name, function))
        _fixed.append(noise)
        stack.callback(_fixed.pop)
        yield


def _given(args: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Two arguments that may be positional."""
    return (*args[:2], *(first, second)[len(args[:2]) :])
