"""The seeds of random layers and of ``keras.random``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

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

    with mock.patch.object(seed_generator, "global_seed_generator", Generator):
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
