"""The state that decides which numbers TensorFlow and Keras draw eagerly without a seed."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from collective.training.keras_compat.seeds import (
    global_seed_state,
    make_global_seed_state,
)


class EagerDraws(NamedTuple):
    """State of the generators of one process."""

    seed: int  # TensorFlow's global seed
    generator: Any  # the generator of the seeds of its operations
    keras: np.ndarray | None  # the state of ``keras.random``; None if not made yet


def eager_draws() -> EagerDraws:
    """Return the state of this process' generators, and set a seed if there is none."""
    known = context.context()
    if known._seed is None:  # else an operation draws numbers that cannot be repeated
        tf.random.set_seed(int.from_bytes(os.urandom(4), "little"))
    state = global_seed_state()
    numbers = None if state is None else np.array(state)
    return EagerDraws(known._seed, known._rng.getstate(), numbers)


def set_eager_draws(draws: EagerDraws, again: bool = False) -> None:
    """Continue like the process that has this state.

    Args:
        again: Whether numbers that were drawn since must be drawn again. Otherwise,
            operations with the same seed continue.
    """
    known = context.context()
    if again or known._seed != draws.seed:
        tf.random.set_seed(draws.seed)
    known._rng.setstate(draws.generator)
    if draws.keras is not None:
        make_global_seed_state().assign(draws.keras)
