"""The same random numbers on every rank, for scripts that set no seed."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
from typing import Any

import keras
import numpy as np

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.keras_compat import entry_points
from collective.training.unedited.replaced import Replaced

VARIABLE = "COLLECTIVE_SEED"


def seed_all_ranks(backend: Backend, replaced: Replaced) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras alike on every rank.

    With ``COLLECTIVE_SEED``, else with a number that rank 0 draws. A seed that the
    script has set already, or sets later, wins.

    Raises:
        UsageError: The variable is not a number.
    """
    seed = int(backend.broadcast_array(np.array([_seed()]))[0])
    if entry_points.global_seed() is None:
        keras.utils.set_random_seed(seed)
    _seed_new_generators(seed, replaced)


def _seed() -> int:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return secrets.randbits(31)
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):
        raise UsageError(
            f"{VARIABLE}={text!r} is not a whole number below 2**32",
            hint=f"{VARIABLE}=0",
        )
    return int(text)


def _seed_new_generators(shared: int, replaced: Replaced) -> None:
    """Has ``np.random.default_rng()`` without a seed give all ranks the same numbers."""
    stock, calls = np.random.default_rng, itertools.count()

    @functools.wraps(stock)
    def default_rng(seed: Any = None) -> np.random.Generator:
        return stock((shared, next(calls)) if seed is None else seed)

    replaced.set(np.random, "default_rng", default_rng)
