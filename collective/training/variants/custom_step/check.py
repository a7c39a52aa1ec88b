"""A user's own step proves itself before it trains.

All ranks run it on a few rows in pieces of unequal size; rank 0 runs it on the same rows
in one piece, as Keras would. Gradients that reach an optimizer, metrics, returned values
and state must agree. Everything is undone afterwards. Random numbers depend on the row
alone meanwhile, so that models with noise are compared, too.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError, UsageError
from collective.training import compatibility, keras_compat
from collective.training.exchange import broadcast_object, gather
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Batch, Input
from collective.training.input.plan import share
from collective.training.keras_compat import path_of, record_applied, tf_variable
from collective.training.step.rows import Rows
from collective.training.variables import all_variables, broadcast_model
from collective.training.variants.custom_step.building import packed
from collective.training.variants.custom_step.replica import flat_logs
from collective.training.variants.custom_step.step import CustomStep
from collective.training.verification.first_rows import first_rows

# Rows of each replica: unlike each other, and unlike most widths of a network.
PIECES = (11, 7, 13, 5)
Values = dict[str, np.ndarray]


def check_step(
    step: CustomStep, inputs: Input | Batches, wanted: bool = True
) -> list[str]:
    """Compares the step with Keras' own; every rank calls it.

    Args:
        wanted: Whether to; that of rank 0 counts.

    Returns:
        Lines for the user; none with one replica, whose step is Keras' own.

    Raises:
        UsageError: On every rank, naming what differs.
    """
    backend, model = step.backend, step.model
    if backend.most_replicas == 1 or not broadcast_object(backend, wanted):
        return []
    begin = time.perf_counter()
    broadcast_model(model, backend)
    whole = first_rows(inputs, sum(PIECES))
    if whole is None:
        return [
            "its train_step is not compared with Keras': the data are no plain tensors"
        ]
    cut = _cut(len(tf.nest.flatten(whole.x)[0]), backend.replicas)
    start, stop = cut[backend.rank], cut[backend.rank + 1]
    state = step.local.state
    noise = keras_compat.FixedNoise(start, stop, cut[-1])
    mine: Rows = tf.nest.map_structure(lambda t: t[start:stop], whole)
    batch = Batch(*mine, tf.constant(cut[-1], tf.int64), ())
    with undone(model, state) as variables:
        with keras_compat.fixed_noise(noise), _explained(model):
            ours = run(model, state, lambda: step.try_on(batch))
        differing = _differing(backend, variables)
    problem = ""
    if differing:
        problem = (
            f"it leaves other values in {differing!r} on each rank; it writes what it "
            "has computed from its part of the rows"
        )
    elif backend.rank == 0:
        problem = _compare_with_keras(model, state, whole, cut[-1], ours)
    problem = broadcast_object(backend, problem)
    if problem:
        raise UsageError(
            f"model {model.name!r}: its train_step on {cut[-1]} rows cut into "
            f"{backend.replicas} pieces is not that on the rows in one piece: {problem}",
            hint="take means over rows, and couple no rows of a batch; or "
            f"{compatibility.FEATURES['own_step'].without}; or verify=False, where that "
            "is what you mean",
        )
    seconds = time.perf_counter() - begin
    sizes = [b - a for a, b in itertools.pairwise(cut)]
    lines = [
        f"train_step of {model.name!r}: the same on {cut[-1]} rows in pieces of "
        f"{', '.join(map(str, sizes))} as in one piece ({seconds:.1f} s)"
    ]
    if noise.normalizes and not step.local.synchronizes:
        lines.append(
            "batch statistics are each replica's own: they depend on the number of "
            "replicas"
        )
    return lines


@contextlib.contextmanager
def _explained(model: keras.Model) -> Iterator[None]:
    """Says that it is the check that failed, which runs the step eagerly."""
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        raise UsageError(
            f"the train_step of model {model.name!r} could not be run eagerly, to "
            f"compare it before it trains: {type(error).__name__}: {error}",
            hint="verify=False trains without the comparison",
            everywhere=False,
        ) from error


def _cut(rows: int, replicas: int) -> list[int]:
    """Where the replicas' pieces begin, and the last one stops."""
    if replicas <= len(PIECES) and sum(PIECES[:replicas]) <= rows:
        return [sum(PIECES[:r]) for r in range(replicas + 1)]
    total = min(rows, 2 * replicas + 1)
    return [share(total, r, replicas)[0] for r in range(replicas)] + [total]


def _differing(backend: Backend, variables: list[Any]) -> str:
    """The first variable whose value is not the same on all ranks; or nothing."""
    sums = [
        zlib.crc32(np.ascontiguousarray(keras.ops.convert_to_numpy(v)).tobytes())
        for v in variables
    ]
    by_rank = gather(backend, np.array(sums, np.float64))
    differ = np.flatnonzero(np.any(by_rank != by_rank[0], axis=0))
    return path_of(variables[differ[0]]) if differ.size else ""


def _compare_with_keras(
    model: keras.Model, state: list[Any], whole: Rows, total: int, ours: Trial
) -> str:
    """On rank 0: what differs, in words; nothing where all agrees."""
    rows = tf.nest.map_structure(lambda t: t[:total], whole)

    def step() -> dict[str, Any]:
        with keras_compat.intercept(keras_compat.Hooks()):
            return flat_logs(model.train_step(packed(rows)))

    noise = keras_compat.FixedNoise(0, total, total)
    with undone(model, state), keras_compat.fixed_noise(noise), _explained(model):
        return differences(ours, run(model, state, step))


def differences(ours: Trial, keras_trial: Trial) -> str:
    """The first thing in which two trials differ beyond rounding, in words."""
    kinds: list[tuple[str, Callable[[str], str], str, str]] = [
        (
            "gradients",
            lambda key: " for ".join(map(repr, key.split("|")[:2])),
            "the gradient of",
            "a loss couples rows of the batch, or sums over them",
        ),
        ("metrics", repr, "the metric variable", "it is no sum over rows"),
        (
            "state",
            lambda key: repr(key.split("|")[0]),
            "the state",
            "it is no mean over rows",
        ),
        (
            "logs",
            repr,
            "the returned",
            "it is no mean over rows and no metric's result",
        ),
    ]
    for kind, name, what, why in kinds:
        mine, theirs = getattr(ours, kind), getattr(keras_trial, kind)
        if set(mine) != set(theirs):
            odd = sorted(set(mine) ^ set(theirs))[0]
            return f"{name(odd)} is there in one case only"
        worst, by = _worst(mine, theirs)
        if by > 1:
            size = by * _tolerance(theirs[worst])
            return f"{what} {name(worst)} differs by {size:.2g} of its size; {why}"
    return ""


def _worst(mine: Values, theirs: Values) -> tuple[str, float]:
    """Where the values differ most, and how many tolerances."""
    largest = max((np.abs(v).max(initial=0) for v in theirs.values()), default=0)
    worst, most = "", 0.0
    for key, value in theirs.items():
        if keras_compat.SEED_STATE in key or not np.issubdtype(value.dtype, np.number):
            continue
        value = value.astype(np.float64)
        # What is small beside all others is made of what cancels out.
        scale = max(np.abs(value).max(initial=0), 1e-4 * largest, 1e-30)
        by = np.abs(mine[key].astype(np.float64) - value).max(initial=0) / scale
        by = by / _tolerance(theirs[key]) if np.isfinite(by) else 0.0
        if by > most:
            worst, most = key, by
    return worst, most


def _tolerance(value: np.ndarray) -> float:
    """Relative rounding that a few operations may add up to."""
    half = keras.config.dtype_policy().name.startswith("mixed_")
    return 0.05 if half else 1e-7 if value.dtype == np.float64 else 2e-3


@dataclass
class Trial:
    """What a step has done.

    Attributes:
        gradients: Those that optimizers applied, in order, by variable.
        metrics: Variables of the metrics afterwards.
        state: All other variables afterwards, but those that optimizers write.
    """

    gradients: Values
    metrics: Values
    logs: Values
    state: Values


def run(
    model: keras.Model, state: list[Any], step: Callable[[], dict[str, Any]]
) -> Trial:
    """Runs a step eagerly, which returns its logs, and writes ``state`` besides."""
    applied: list[tuple[str, Any, list[Any], list[Any]]] = []
    with record_applied(applied):
        logs = step()
    gradients, updated = {}, set()
    for number, (name, optimizer, grads, variables) in enumerate(applied):
        for variable, gradient in zip(variables, grads, strict=True):
            if gradient is not None:
                key = f"{path_of(variable)}|{name}|{number}"
                gradients[key] = _array(gradient)
        updated |= {id(tf_variable(v)) for v in [*variables, *optimizer.variables]}
    metrics = {id(tf_variable(v)): v for v in model.metrics_variables}
    others = {id(tf_variable(v)): v for v in [*all_variables(model), *state]}
    return Trial(
        gradients,
        {path_of(v): _array(v) for v in metrics.values()},
        {name: _array(value) for name, value in logs.items()},
        {
            f"{path_of(v)}|{place}": _array(v)
            for place, (key, v) in enumerate(others.items())
            if key not in updated and key not in metrics
        },
    )


@contextlib.contextmanager
def undone(model: keras.Model, state: list[Any]) -> Iterator[list[Any]]:
    """Afterwards, variables and plain attributes of the model are as before."""
    every = [*all_variables(model), *model.metrics_variables, *state]
    variables = list({id(tf_variable(v)): v for v in every}.values())
    values = [_array(v) for v in variables]
    plain = (bool, int, float, str, type(None))
    attributes = {k: v for k, v in vars(model).items() if isinstance(v, plain)}
    try:
        yield variables
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        for name, attribute in attributes.items():
            if getattr(model, name) is not attribute:
                setattr(model, name, attribute)


def _array(value: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(value))
