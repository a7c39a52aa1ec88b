"""``whole_batch=True``: Keras' own fit, evaluate or predict on rank 0; other ranks wait.

For models of which a batch cannot be cut: those that centre over its rows, batch graphs,
batch renormalization. The numbers are those of one process, and so is the time. Afterwards
every rank has rank 0's model, result, callbacks and random numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from collective.backends.base import Backend
from collective.distribute.models import as_one_process
from collective.errors import UsageError
from collective.fit_options import FitOptions
from collective.log import log
from collective.training import failure, host_random, keras_compat
from collective.training.exchange import broadcast_object
from collective.training.loop.callback_state import CallbackState
from collective.training.loop.callbacks import flatten
from collective.training.verification import compare_settings

_WORKS, _ENDED, _FAILED = range(3)
_BEAT_SECONDS = 10.0  # a wait in a collective has a deadline


class _Beat(keras.callbacks.Callback):
    """Reports to the waiting ranks that rank 0 still works."""

    def __init__(self, backend: Backend):
        super().__init__()
        self._backend, self._last = backend, time.monotonic()

    def beat(self, *_: Any, **__: Any) -> None:
        """As any hook."""
        if time.monotonic() - self._last > _BEAT_SECONDS:
            self._last = time.monotonic()
            with self._backend.with_all_ranks():
                self._backend.broadcast_array(np.array([_WORKS]))

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = beat
    on_epoch_begin = on_epoch_end = beat


def run(
    method: str, model: keras.Model, backend: Backend, given: Mapping[str, Any]
) -> Any:
    """Runs a method of ``keras.Model`` on rank 0; every rank calls it.

    Args:
        method: ``fit``, ``evaluate`` or ``predict``.
        model: Compiled, but for ``predict``.
        given: The arguments that Keras' method takes, by name.

    Returns:
        What the method returns, on every rank.

    Raises:
        UsageError: The model is in shards, in a strategy, or the job is elastic.
        Exception: What the method raised, on every rank.
    """
    _check(model, backend)
    stock = getattr(keras.Model, method)
    stock = getattr(stock, "stock", stock)
    if backend.size == 1:
        return stock(model, **given)
    callbacks = flatten(given.get("callbacks"))
    state = CallbackState(callbacks)
    result, error = None, None
    if backend.rank == 0:
        log.warning(
            f"{method} with whole_batch: rank 0 computes all rows of each batch, and "
            f"{backend.size - 1} more wait: no faster than one process"
        )
        state.begin()
        beat = _Beat(backend)
        words = {**given, "callbacks": [*callbacks, beat]}
        try:
            with backend.only_rank_zero(f"Keras' own {method}"):
                result = stock(model, **words)
        except Exception as raised:
            error = raised
        backend.broadcast_array(np.array([_ENDED if error is None else _FAILED]))
    else:
        while (said := backend.broadcast_array(np.array([_WORKS]))[0]) == _WORKS:
            pass
        error = Exception() if said == _FAILED else None
    if error is not None:
        own = error if backend.rank == 0 else None
        raise failure.share(own, f"Keras' own {method}", backend)
    _share_model(model, backend, built_optimizer=method == "fit")
    state.share(backend, model, getattr(result, "params", {}))
    host_random.share(backend)
    return _share_result(result, model, backend)


def fit(model: keras.Model, backend: Backend, given: Mapping[str, Any]) -> Any:
    """``collective.fit(whole_batch=True)``, with its arguments.

    Raises:
        UsageError: Beside what ``run`` raises: there are options that Keras has not.
    """
    beside = [
        field.name
        for field in dataclasses.fields(FitOptions)
        if given[field.name] != field.default
        and field.name not in ("whole_batch", "verify", "embedding_gradients")
    ]
    beside += [n for n in ("checkpoint", "ledger", "data") if given[n] is not None]
    if beside:
        raise UsageError(
            f"whole_batch does not work with {', '.join(beside)}: rank 0 trains by Keras' "
            "own fit",
            hint="leave one of them out",
        )
    names = list(inspect.signature(keras.Model.fit).parameters)[1:]
    with failure.guarded(backend), as_one_process(model):
        compare_settings(backend)
        return run("fit", model, backend, {name: given[name] for name in names})


def _check(model: keras.Model, backend: Backend) -> None:
    why = ""
    if not isinstance(model, keras.Model):
        why = "it takes a model, not a function that makes one"
    elif backend.elastic:
        why = "rank 0 of an elastic job may leave it"
    elif len(backend.local_replicas) > 1 or backend.tensor is not None:
        why = f"a replica of backend {backend.name!r} is not one process"
    elif getattr(backend, "strategy", None) is not None:
        why = f"backend {backend.name!r} runs the model in a strategy of TensorFlow's"
    if why:
        raise UsageError(
            f"whole_batch cannot be used: {why}", hint="--backend native, or mpi"
        )


def _share_model(model: keras.Model, backend: Backend, built_optimizer: bool) -> None:
    """Gives every rank rank 0's variables; makes them where there are none yet."""
    config = model.get_build_config() if backend.rank == 0 else None
    config = broadcast_object(backend, config)
    if not model.built and config:
        model.build_from_config(config)
    variables = list(model.variables)
    if built_optimizer and model.optimizer is not None:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables += model.optimizer.variables
    seed = keras_compat.make_global_seed_state()
    values = [np.asarray(v) for v in [*variables, seed]]
    values = broadcast_object(backend, values if backend.rank == 0 else None)
    for variable, value in zip([*variables, seed], values, strict=True):
        if backend.rank:
            variable.assign(value)


def _share_result(result: Any, model: keras.Model, backend: Backend) -> Any:
    """The result; of ``fit``, the ``History``."""
    if isinstance(result, keras.callbacks.History):
        mine = {name: getattr(result, name) for name in ("history", "epoch", "params")}
    else:
        mine = result
    found = broadcast_object(backend, mine)
    if not isinstance(found, dict) or set(found) != {"history", "epoch", "params"}:
        return found if backend.rank else result
    if backend.rank:
        result = keras.callbacks.History()
        result.set_model(model)
        vars(result).update(found)
        model.history = result
    return result
