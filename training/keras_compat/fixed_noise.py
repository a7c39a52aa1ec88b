"""Random numbers that depend on the row alone, to compare a step in pieces and in one.

Real noise cannot be compared: the same seed gives other numbers for other shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf


class FixedNoise:
    """Draws for the rows ``start`` to ``stop`` of ``total``; eagerly only.

    A draw with as many rows as there are here gives each row the numbers that it has in
    every other cut; a draw of another shape gives one constant.

    Attributes:
        used: Whether there was a draw.
    """

    def __init__(self, start: int, stop: int, total: int):
        self.start, self.stop, self.total = start, stop, total
        self.used = False
        self._draws = 0

    def uniform(self, shape: Any) -> np.ndarray:
        """Numbers between 0 and 1."""
        self.used = True
        self._draws += 1
        sizes = [int(size) for size in np.asarray(shape).reshape(-1)]
        if not sizes or sizes[0] != self.stop - self.start:
            return np.full(sizes, 0.625)
        table = np.random.default_rng(self._draws).uniform(
            0.02, 0.98, (self.total, *sizes[1:])
        )
        return table[self.start : self.stop]


@contextlib.contextmanager
def fixed_noise(noise: FixedNoise) -> Iterator[None]:
    """Inside, TensorFlow's random functions, which Keras' call, draw from ``noise``.

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
        noise.used = True
        return tf.identity(values)

    def moments(layer: Any, inputs: Any, mask: Any) -> Any:
        noise.used = True
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
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


def _given(args: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Two arguments that may be positional."""
    return (*args[:2], *(first, second)[len(args[:2]) :])
