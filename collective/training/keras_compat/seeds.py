"""The seed generators of Keras: their states, and states derived from one seed."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

SEED_STATE = "seed_generator_state"
# Keras' own name for it. Keras 3.12, the last for Python 3.10, has no constant for it.
GLOBAL_SEED_GENERATOR = "global_seed_generator"


def is_seed_state(variable: keras.Variable) -> bool:
    """Return whether the variable is the state of a ``keras.random.SeedGenerator``."""
    return variable.name == SEED_STATE and tuple(variable.shape) == (2,)


def global_seed_state() -> keras.Variable | None:
    """Return the state of the generator that ``keras.random`` uses without a seed, or None."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_global_seed_state() -> keras.Variable:
    """Return ``global_seed_state``, but make the generator if there is none."""
    return seed_generator.global_seed_generator().state


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Return the states of the seed generators that a call of the model may advance."""
    shared = global_seed_state()
    own = [variable for variable in model.variables if is_seed_state(variable)]
    return own if shared is None else [*own, shared]


def reseed(variables: Sequence[tf.Variable], seed: int) -> None:
    """Set the states of seed generators to values that depend on a seed and their order."""
    key = tf.constant([seed % 2**31, 0], tf.int32)
    states = [variable for variable in variables if SEED_STATE in variable.name]
    for number, variable in enumerate(states):
        state = tf.random.experimental.stateless_fold_in(key, number)
        variable.assign(tf.cast(state, variable.dtype))
