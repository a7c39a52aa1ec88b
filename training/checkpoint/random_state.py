"""The generators of random numbers that live outside of any layer.

No step draws from them: order of rows, masks and noise follow from the seed and the
number of the step. But a user's callback or a model's ``build`` may draw from Python's,
NumPy's or Keras' global generator, so they belong to the state of a training. TensorFlow's own stateful generators cannot be read and are left alone.
"""

from __future__ import annotations

import random

import numpy as np

from collective.training import keras_compat

_NUMPY = "MT19937"


def take() -> dict[str, np.ndarray]:
    """The generators' states: integers, and floats for a half-used pair of normals."""
    _, words, spare = random.getstate()
    state = {
        "python": np.array(words, np.uint32),
        "python_spare": np.array([np.nan if spare is None else spare]),
    }
    kind, key, *rest = np.random.get_state()
    if kind == _NUMPY:
        state["numpy"] = np.array(key, np.uint32)
        state["numpy_spare"] = np.array(rest, np.float64)
    if (seed := keras_compat.global_seed_state()) is not None:
        state["keras"] = np.array(seed)
    return state


def put(state: dict[str, np.ndarray]) -> None:
    """Puts back what ``take`` returned; an empty one changes nothing."""
    if not state:
        return
    spare = float(state["python_spare"][0])
    words = tuple(int(word) for word in state["python"])
    random.setstate((3, words, None if np.isnan(spare) else spare))
    if "numpy" in state:
        place, has, value = state["numpy_spare"]
        np.random.set_state((_NUMPY, state["numpy"], int(place), int(has), value))
    if "keras" in state:
        keras_compat.make_global_seed_state().assign(state["keras"])
