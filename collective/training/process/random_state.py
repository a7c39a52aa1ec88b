"""The random state of a process, from which a repeated step begins again."""

from __future__ import annotations

import keras
import numpy as np

from collective.training import keras_compat
from collective.training.process import host_random


class RandomState:
    """The current state of Python's and NumPy's generators and of a model's seeds."""

    def __init__(self, model: object):
        self._host = host_random.state()
        known = isinstance(model, keras.Model)
        states = keras_compat.seeds.seed_states(model) if known else []
        self._seeds = [(state, np.array(state)) for state in states]

    def put(self) -> None:
        """Put the state back."""
        host_random.set_state(self._host)
        for state, value in self._seeds:
            state.assign(value)
