"""Random numbers of an unedited script: the same on every rank, also without a seed."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
from typing import Any

import keras
import numpy as np

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import entry_points
from collective.training.unedited.entropy import share_entropy
from collective.training.unedited.script_job import ScriptJob

VARIABLE = "COLLECTIVE_SEED"


def seed_all_ranks(job: ScriptJob, asked: int | None = None) -> None:
    """Seed Python, NumPy, TensorFlow and Keras alike on every rank.

    Args:
        asked: The seed. If None, that of ``COLLECTIVE_SEED``, or a number that rank 0
            draws. A seed that the script has set already, or sets later, wins.
    """
    drawn = np.array([_seed() if asked is None else asked])
    shared = int(
        job.units.run(lambda: job.backend.broadcast_array(drawn)[0], "the start")
    )
    if asked is not None or entry_points.global_seed() is None:
        keras.utils.set_random_seed(shared)
        job.seed = None if asked is not None else shared
    stock, calls = np.random.default_rng, itertools.count()

    @functools.wraps(stock)
    def default_rng(seed: Any = None) -> np.random.Generator:
        return stock((shared, next(calls)) if seed is None else seed)

    job.replace(np.random, "default_rng", default_rng)
    share_entropy(job, shared)


def is_unseeded(job: ScriptJob) -> bool:
    """Return whether nobody has set a seed: it is the one that was drawn.

    With a seed of TensorFlow's, each epoch of Keras has the same order, which a script
    without a seed does not expect.
    """
    seeds = {entry_points.global_seed(), keras_compat.data.tensorflow_seed()}
    return seeds - {None} == {job.seed}  # clear_session forgets that of Keras


def fit_seed(job: ScriptJob) -> int:
    """Return the seed of a call of ``fit`` in a script that sets none.

    It follows from the seed of the script, and from the calls before it: epochs that a
    script runs by a call of ``fit`` each have different orders, as in Keras.
    """
    job.fits += 1
    seed = entry_points.global_seed() or 0
    words = np.random.SeedSequence([seed % 2**32, job.fits]).generate_state(1)
    return int(words[0])


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
