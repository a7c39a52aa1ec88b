"""``keras.Model.fit``, ``evaluate`` and ``predict``, run by all ranks together.

With the same random numbers on every rank, for scripts that set no seed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

import collective
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import entry_points
from collective.training.prepare import ModelMisfit
from collective.training.unedited.entropy import share_entropy
from collective.training.unedited.keras_distribution.job_devices import check_current
from collective.training.unedited.keras_distribution.model_parallel import backend_for
from collective.training.unedited.script_job import EVALUATE, FIT, PREDICT, ScriptJob

VARIABLE = "COLLECTIVE_SEED"
# With this argument Keras' own fit validates, where a script kept a reference to it.
_FROM_KERAS_FIT = "_use_cached_eval_dataset"
_WHOLE = ("train_on_batch", "test_on_batch", "predict_on_batch")


def replace_calls(
    job: ScriptJob,
    options: Mapping[str, Any],
    applies: Callable[[keras.Model], bool] | None = None,
    loops: bool = False,
) -> None:
    """Replaces the three methods, for every model there is and will be.

    Args:
        loops: Whether ``train_on_batch`` and its sisters are distributed, too.
        options: Of ``collective.fit``.
        applies: Whether a model gets our methods. If None, all models do.
    """
    # As ``Model`` has them from a class above it, they are set on ``Model`` itself.
    model, backend = keras.Model, job.backend

    def fit(self: keras.Model, **given: Any) -> Any:
        seed = fit_seed(self) if is_unseeded(job) else None
        ours = {"seed": seed, **options}
        return collective.fit(self, **given, **ours, backend=backend_for(job, self))

    def evaluate(self: keras.Model, **given: Any) -> Any:
        return collective.evaluate(self, **given, backend=backend_for(job, self))

    def predict(self: keras.Model, **given: Any) -> Any:
        return collective.predict(self, **given, backend=backend_for(job, self))

    for call, ours in ((FIT, fit), (EVALUATE, evaluate), (PREDICT, predict)):
        stock = getattr(model, ours.__name__)
        job.replace(model, ours.__name__, _together(job, call, stock, ours, applies))
    if backend.size > 1 and applies is None and not loops:
        for name in _WHOLE:
            job.replace(model, name, _noted(job, getattr(model, name)))


def seed_all_ranks(job: ScriptJob) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras alike on every rank.

    Uses ``COLLECTIVE_SEED``, or a number that rank 0 draws. A seed that the
    script has set already, or sets later, wins.
    """
    drawn = np.array([_seed()])
    shared = int(
        job.recovery.run(lambda: job.backend.broadcast_array(drawn)[0], "the start")
    )
    if entry_points.global_seed() is None:
        keras.utils.set_random_seed(shared)
        job.seed = shared
    stock, calls = np.random.default_rng, itertools.count()

    @functools.wraps(stock)
    def default_rng(seed: Any = None) -> np.random.Generator:
        return stock((shared, next(calls)) if seed is None else seed)

    job.replace(np.random, "default_rng", default_rng)
    share_entropy(job, shared)


def is_unseeded(job: ScriptJob) -> bool:
    """Whether the seeds are those of ``seed_all_ranks`` still.

    With a seed of TensorFlow's, each epoch of Keras has the same order: none that a
    script without one expects.
    """
    seeds = {entry_points.global_seed(), keras_compat.data.tensorflow_seed()}
    return seeds - {None} == {job.seed}  # clear_session forgets that of Keras


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


def fit_seed(model: keras.Model) -> int:
    """The seed of a call of ``fit`` in a script that sets none.

    It follows from the seed of the script, and from the steps that the model was trained
    before: epochs that a script runs by a call of ``fit`` each have different orders, as
    in Keras.
    """
    optimizer = getattr(model, "optimizer", None)
    done = int(np.asarray(getattr(optimizer, "iterations", 0)))
    seed = entry_points.global_seed() or 0
    words = np.random.SeedSequence([seed % 2**32, done]).generate_state(1)
    return int(words[0])


def are_replaced() -> bool:
    """Whether Keras' methods are ours already."""
    return hasattr(keras.Model.fit, "stock")


def _together(
    job: ScriptJob,
    call: str,
    stock: Callable[..., Any],
    ours: Callable[..., Any],
    applies: Callable[[keras.Model], bool] | None,
) -> Callable[..., Any]:
    """A method with the signature and documentation of Keras' own."""
    signature = inspect.signature(stock)
    names = list(signature.parameters)[1:]

    @functools.wraps(stock)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        not_ours = applies is not None and not applies(self)
        if job.inside or _FROM_KERAS_FIT in kwargs or not_ours:
            return stock(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)  # a TypeError as Keras' own
        check_keras()
        check_current(job)

        def attempt() -> Any:
            with job.calling(call), _as_keras_raises():
                return ours(self, **dict(zip(names, args, strict=False)), **kwargs)

        data = [bound.arguments.get(name) for name in ("x", "validation_data")]
        return job.recovery.run(attempt, call, self, data)

    method.stock = stock  # type: ignore[attr-defined]
    return method


@contextlib.contextmanager
def _as_keras_raises() -> Iterator[None]:
    """Raises what Keras or the script's own layers raised, for the script to catch."""
    try:
        yield
    except ModelMisfit as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


def _noted(job: ScriptJob, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' own method, which says once that it is not distributed."""

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not job.inside:
            job.warn_once(
                stock.__name__,
                "%s is not distributed: each of the %d processes runs it whole "
                "(fit, evaluate and predict are distributed; with --loops so is this)",
                job.backend.size,
            )
        return stock(*args, **kwargs)

    return method


def check_keras() -> None:
    """Refuses a Keras backend that the script asked for when it was too late."""
    wanted = os.environ.get("KERAS_BACKEND", "tensorflow")
    if wanted != keras.backend.backend() or wanted != "tensorflow":
        raise UsageError(
            f"the script asks for Keras' backend {wanted!r}, and only 'tensorflow' can "
            "be distributed",
            hint="unset KERAS_BACKEND, or run the script by python itself",
        )
