"""A user's own step proves itself before it trains.

All ranks run it on a few rows in pieces of unequal size; rank 0 runs it on the same rows
in one piece, as Keras would. Gradients that reach an optimizer, metrics, returned values
and state must agree. Everything is undone afterwards. Random numbers depend on the row
alone meanwhile, so that models with noise are compared, too.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError, UsageError, first_line
from collective.training import compatibility, failure, keras_compat, own_batches
from collective.training.exchange import broadcast_object, gather
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Batch, Input
from collective.training.input.plan import share
from collective.training.keras_compat import path_of, record_applied, tf_variable
from collective.training.step.accumulation import slice_rows
from collective.training.step.rows import Rows
from collective.training.variables import all_variables, broadcast_model
from collective.training.variants.custom_step.additive import NotingHooks
from collective.training.variants.custom_step.building import packed
from collective.training.variants.custom_step.local_step import flat_logs
from collective.training.variants.custom_step.step import CustomStep
from collective.training.verification import is_wanted
from collective.training.verification.differences import Pair, differing, tolerance
from collective.training.verification.first_rows import (
    count,
    fewer,
    first_batches,
    uneven,
)
from collective.training.verification.settings import exact_products

# Rows of each replica, about: a gradient of few rows hides what couples them.
_ROWS = 11
# A step may differentiate several times: a multiple of what one pass may be off.
_LOOSER = 20
Values = dict[str, np.ndarray]
# What is compared, and why it may differ.
_WORDS = {
    "gradient": (
        "the gradient of",
        "a loss couples rows of the batch, or sums over them",
    ),
    "metric": ("the metric variable", "it is not a sum over rows"),
    "state": ("the state", "it is not a mean over rows"),
    "log": ("the returned", "it is not a mean over rows and no metric's result"),
}


@exact_products()
def check_step(
    step: CustomStep, inputs: Input | Batches, wanted: bool = True
) -> list[str]:
    """Compares the step with Keras' own; every rank calls it.

    Args:
        wanted: Whether to; that of rank 0 counts.

    Returns:
        Lines for the user; none with one piece, whose step is Keras' own.

    Raises:
        UsageError: On every rank, naming what differs.
    """
    backend, model, name = step.backend, step.model, step.local.method.__name__
    if step.local.is_whole or not broadcast_object(backend, wanted):
        return []
    begin = time.perf_counter()
    broadcast_model(model, backend)
    batches = first_batches(inputs)
    if not batches:
        return []
    parts = step.virtual.count if step.virtual else backend.replicas
    pieces = parts * step.micro_batches
    whole = fewer(batches[0], _ROWS * pieces)
    if _cuts(step):
        whole = _unlike(whole, pieces)
    sizes, held = _cut(step, count(whole))
    normalizes = False

    def trial() -> tuple[Trial, str]:
        nonlocal normalizes
        ours, differing, normalizes = _in_pieces(step, whole, sizes, held)
        return ours, differing

    problem = _problem_of(step, whole, *trial())
    while problem and _found_sums(step, whole, trial):
        problem = _problem_of(step, whole, *trial())
    if problem:
        raise UsageError(
            f"model {model.name!r}: its {name} on {count(whole)} rows cut into "
            f"{pieces} pieces is not that on the rows in one piece: {problem}",
            hint="take means or sums over rows, and couple no rows of a batch; or "
            f"{own_batches.HINT}; or {compatibility.FEATURES['own_step'].without}",
        )
    if step.local.additive.found:
        step.trace_again()
    seconds = time.perf_counter() - begin
    micro = f", each {step.micro_batches} micro-batches," * (step.micro_batches > 1)
    lines = [
        f"{name} of {model.name!r}: the same on {count(whole)} rows in pieces of "
        f"{', '.join(map(str, sizes))}{micro} as in one piece ({seconds:.1f} s)"
    ]
    if step.local.additive.found:
        lines.append(f"sums over rows in it: {step.local.additive}")
    if normalizes and not step.local.synchronizes:
        lines.append(
            "batch statistics are each replica's own: they depend on the number of "
            "replicas"
        )
    return lines


def _unlike(rows: Rows, pieces: int) -> Rows:
    """A row less where all pieces would have as many: a mean of means is no mean then."""
    total = count(rows)
    return fewer(rows, total - 1) if total % pieces == 0 and total > pieces else rows


def _cuts(step: CustomStep) -> bool:
    """Whether the step cuts rows itself, and its pieces draw for the rows of that cut."""
    in_process = len(step.backend.local_replicas)
    return step.virtual is not None or max(in_process, step.micro_batches) > 1


def _cut(step: CustomStep, rows: int) -> tuple[list[int], range]:
    """The sizes of the pieces of some rows, and which of them this rank has."""
    backend, own = step.backend, step.backend.local_replicas
    if not _cuts(step):
        sizes = uneven(rows, backend.replicas)
        return sizes + [0] * (backend.replicas - len(sizes)), own
    count = step.virtual.count if step.virtual else backend.replicas
    shares = [share(rows, piece, count) for piece in range(count)]
    sizes = [stop - start for start, stop in shares]
    return sizes, step.virtual.held(backend) if step.virtual else own


_checked: WeakKeyDictionary[keras.Model, set[Any]] = WeakKeyDictionary()


def check_once(step: CustomStep, inputs: Input | Batches) -> None:
    """As ``check_step``, once for a model as it is compiled and a kind of data."""
    of_model = _checked.setdefault(step.model, set())
    key = repr(inputs.spec), step.local.method.__name__, step.model.optimizer
    if key not in of_model:
        check_step(step, inputs, is_wanted())
        of_model.add(key)


@contextlib.contextmanager
def _explained(step: CustomStep) -> Iterator[None]:
    """Says that it is the check that failed, which runs the step eagerly."""
    try:
        yield
    except CollectiveError:
        raise
    except Exception as error:
        first = first_line(error)[:300]
        raise UsageError(
            f"the train_step of model {step.model.name!r} could not be run eagerly, to "
            f"compare it before it trains: {type(error).__name__}: {first}",
            hint=f"{own_batches.HINT}; or verify=False trains without the comparison",
            everywhere=failure.fails_alike(error, step.backend),
        ) from error


def _differing(backend: Backend, variables: list[Any]) -> str:
    """The first variable whose value is not the same on all ranks; or nothing."""
    sums = [zlib.crc32(np.ascontiguousarray(_array(v)).tobytes()) for v in variables]
    by_rank = gather(backend, np.array(sums, np.float64))
    differ = np.flatnonzero(np.any(by_rank != by_rank[0], axis=0))
    return path_of(variables[differ[0]]) if differ.size else ""


def _in_pieces(
    step: CustomStep, whole: Rows, sizes: Sequence[int], held: range
) -> tuple[Trial, str, bool]:
    """The step on the replicas' rows, undone afterwards; every rank calls it.

    Returns:
        What it has done, what it leaves other than on other ranks, and whether a layer
        has normalized by its batch.
    """
    backend, model, state = step.backend, step.model, step.local.written
    cut = [0, *np.cumsum(sizes).tolist()]
    place = cut[held.start], cut[held.stop]
    noise = keras_compat.FixedNoise(*place, cut[-1])
    mine: Rows = slice_rows(whole, *place)
    batch = Batch(*mine, tf.constant(cut[-1], tf.int64), ())
    with undone(model, state) as variables:
        with keras_compat.fixed_noise(noise), _explained(step):
            ours = run(
                model, state, lambda: step.try_on(batch), update=step.partition is None
            )
        return ours, _differing(backend, variables), noise.normalizes


def _problem_of(step: CustomStep, whole: Rows, ours: Trial, differing: str) -> str:
    """On every rank: what differs from Keras' own step, in words; or nothing."""
    problem = ""
    if differing:
        problem = (
            f"it leaves other values in {differing!r} on each rank; it writes what it "
            "has computed from its part of the rows"
        )
    elif _takes_part(step):
        stock = _by_keras(step, whole, keras_compat.Hooks())
        problem = _problem(step.model, stock, ours)
    return broadcast_object(step.backend, problem)


def _found_sums(
    step: CustomStep, whole: Rows, trial: Callable[[], tuple[Trial, str]]
) -> bool:
    """Looks for numbers that are sums over rows; whether there are more.

    A number of the traced step is known by its place in the program: there are none
    where the eager one has run other branches.
    """
    additive, found = step.local.additive, set()
    traced = step.counts
    additive.means, additive.totals = {}, {}
    try:
        trial()
        additive.sum_over(step.backend)
        if _takes_part(step):
            noting = NotingHooks()
            before = [_array(v) for v in step.local.state]
            with undone(step.model, step.local.written):
                stock = _by_keras(step, whole, noting, keep=True)
                after = [_array(v) for v in step.local.state]
            for name, value in stock.values["log"].items():
                noting.noted["log", name] = [value]
            for i, (old, new) in enumerate(zip(before, after, strict=True)):
                noting.noted["state", i] = [np.asarray(new, np.float64) - old]
            if traced == additive.counts == noting.counts:
                found = set(additive.among(noting.noted))
    finally:
        additive.means = additive.totals = None
    found = broadcast_object(step.backend, found)
    additive.found |= found
    return bool(found)


def _takes_part(step: CustomStep) -> bool:
    """Whether this rank runs Keras' step; all, where each holds copies of variables.

    A copy is a part of the value then, and ranks read the whole together.
    """
    return step.backend.rank == 0 or len(step.backend.local_replicas) > 1


def _by_keras(
    step: CustomStep, whole: Rows, hooks: keras_compat.Hooks, keep: bool = False
) -> Trial:
    """The method on all rows, as Keras calls it; undone afterwards unless kept."""
    model, state, total = step.model, step.local.written, count(whole)

    def method() -> dict[str, Any]:
        with keras_compat.intercept(hooks):
            return flat_logs(step.local.method(packed(whole)))

    noise = keras_compat.FixedNoise(0, total, total)
    undoing: Any = contextlib.nullcontext() if keep else undone(model, state)
    with undoing, keras_compat.fixed_noise(noise), _explained(step):
        update = step.partition is None
        if len(step.backend.local_replicas) == 1:
            return run(model, state, method, update)
        return keras_compat.outside_strategy(run, model, state, method, update)


def _problem(model: keras.Model, stock: Trial, ours: Trial) -> str:
    """The first thing in which two trials differ beyond rounding, in words."""
    pairs = []
    for kind in _WORDS:
        mine, theirs = ours.values[kind], stock.values[kind]
        if set(mine) != set(theirs):
            odd = sorted(set(mine) ^ set(theirs))[0]
            return f"{_shown(odd)} is there in one case only"
        pairs += [
            Pair(kind, name, value, mine[name])
            for name, value in theirs.items()
            if keras_compat.SEED_STATE not in name
            and np.issubdtype(value.dtype, np.number)
        ]
    found = next(differing(pairs, _LOOSER * tolerance(model)), None)
    if found is None:
        return ""
    what, why = _WORDS[found.kind]
    seen = f"{found.stock} in one piece, {found.own} in pieces"
    return f"{what} {_shown(found.name)} differs ({seen}); {why}"


def _shown(key: str) -> str:
    """The name of a variable, and of the optimizer that it has a gradient for."""
    parts = [part for part in key.split("|")[:2] if not part.isdigit()]
    return " for ".join(map(repr, parts))


@dataclass
class Trial:
    """What a step has done."""

    # By kind: ``gradient``, those that optimizers applied, in order, by variable;
    # ``metric``, the metrics' variables afterwards; ``log``, what it returned;
    # ``state``, all other variables, but those that optimizers write.
    values: dict[str, Values]


def run(
    model: keras.Model,
    state: list[Any],
    step: Callable[[], dict[str, Any]],
    update: bool = True,
) -> Trial:
    """Runs a step eagerly, which returns its logs, and writes ``state`` besides.

    Args:
        update: Whether its optimizers update; one of shards knows no whole gradients.
    """
    applied: list[tuple[str, Any, list[Any], list[Any]]] = []
    with record_applied(applied, update):
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
    values = {
        "gradient": gradients,
        "metric": {path_of(v): _array(v) for v in metrics.values()},
        "log": {name: _array(value) for name, value in logs.items()},
        "state": {
            f"{path_of(v)}|{place}": _array(v)
            for place, (key, v) in enumerate(others.items())
            if key not in updated and key not in metrics
        },
    }
    return Trial(values)


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
    try:
        return np.array(keras.ops.convert_to_numpy(value))
    except ValueError:  # one of several replicas' own values, which NumPy cannot read
        return np.array(tf.convert_to_tensor(value))
