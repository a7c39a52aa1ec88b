"""The first call of a step is compared with one process, before it counts.

All ranks run the step on rows of the first batch, cut into pieces of unequal size; rank 0
runs it on the same rows in one piece, as Python alone would. Gradients that reach an
optimizer, what the step returns and what it writes must agree. How each returned number
becomes that of the whole batch is found here. Everything is undone afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.errors import CollectiveError, UsageError, first_line
from collective.log import log
from collective.training import keras_compat
from collective.training.exchange import broadcast_object
from collective.training.unedited.loops import rows
from collective.training.unedited.loops.hooks import gather_rows, written_by
from collective.training.unedited.loops.rows import Piece
from collective.training.unedited.loops.step import (
    GLOBAL,
    MEAN,
    METRIC,
    OTHER_DRAWS,
    ROWS,
    SUM,
    LocalRun,
    Plan,
    RowStep,
    is_numeric,
    local_run,
)
from collective.training.unedited.loops.writes import (
    Write,
    live_metrics,
    recorded_writes,
    undo,
)
from collective.training.verification.settings import exact_products

_MOST_TRIES = 5  # calls until a rule that is not certain is taken
_HINT = (
    "take means over rows, and couple no rows of a batch; or leave out --loops, and each "
    "rank runs the loop whole; or strategy.run of collective.distribute.Strategy()"
)
Values = dict[str, np.ndarray]


@dataclass
class Trial:
    """What a step has done with some rows."""

    # Those that optimizers applied, in order.
    gradients: Values = field(default_factory=dict)
    # What it has written besides, afterwards.
    variables: Values = field(default_factory=dict)
    # For each returned leaf, by rule: what it is of the whole batch.
    outputs: list[dict[str, np.ndarray]] = field(default_factory=list)
    # Shapes of random draws, ``FixedNoise.shapes``.
    draws: list[tuple[int, ...]] = field(default_factory=list)


@exact_products()
def agree(step: RowStep, inputs: Any) -> Plan:
    """Compares the step with one process, and plans it; every rank calls it.

    Raises:
        UsageError: On every rank, naming what differs.
    """
    begin, backend = time.perf_counter(), step.job.backend
    leaves = tf.nest.flatten(inputs)
    among = range(len(leaves)) if step.may_be_rows is None else step.may_be_rows(inputs)
    indices = rows.find_rows(leaves, list(among), step.name)
    total = leaves[indices[0]].shape[0]
    used = total - 1 if total % backend.size == 0 and total > backend.size else total
    leaves = rows.put(leaves, indices, [leaves[i][:used] for i in indices])
    inputs = tf.nest.pack_sequence_as(inputs, leaves)
    problem, whole = "", None
    for sums_over_rows in (False, True):
        ours = _on_own_rows(step, inputs, indices, sums_over_rows)
        verdict: Any = None
        if backend.rank == 0:
            whole = whole or _in_one_piece(step, inputs, indices)
            verdict = _compare(ours, whole)
            _warn_of_draws(step, ours, whole)
        first, rules, certain = broadcast_object(backend, verdict)
        if not first:
            break
        problem = problem or first
    else:
        raise UsageError(
            f"{step.name} on {used} rows cut into {backend.size} pieces is not that on the "
            f"rows in one piece: {problem}",
            hint=_HINT,
        )
    certain = certain or step.calls + 1 >= _MOST_TRIES
    if backend.rank == 0 and step.plan is None:
        seconds = time.perf_counter() - begin
        log.info(
            "%s: the same on %d rows cut into %d pieces as in one piece (%.1f s)",
            step.name,
            used,
            backend.size,
            seconds,
        )
    return Plan(indices, sums_over_rows, rules, certain)


def _on_own_rows(
    step: RowStep, inputs: Any, indices: list[int], sums_over_rows: bool
) -> Trial:
    """The step on this rank's rows, undone."""
    backend, leaves = step.job.backend, tf.nest.flatten(inputs)
    own, piece = rows.cut(leaves, indices, backend, 1)
    stop = piece.start + max(piece.rows, 1)
    noise = keras_compat.FixedNoise(piece.start, stop, max(piece.total, stop))
    applied: list[Any] = []
    written: dict[int, Write] = {}
    try:
        with (
            recorded_writes() as written,
            keras_compat.fixed_noise(noise),
            keras_compat.record_applied(applied),
        ):
            run = step.local(inputs, indices, own, piece.share, piece, sums_over_rows)
        trial = Trial(_gradients(applied), outputs=_candidates(step, run, piece))
        trial.draws = noise.shapes
        step.plan = Plan(indices, sums_over_rows, [], False)
        writes = _written(written, run.updated)
        variables = [w.variable for w in writes]
        before = [w.before for w in writes]
        after = [tf.identity(v) for v in variables]
        step.reduce([], run, variables, before, after, piece, tf.zeros([], tf.float64))
        trial.variables = _values(variables)
        for i, source in run.sources.items():
            trial.outputs[i] = {METRIC: _array(source.part(source.metric.result()))}
        return trial
    except CollectiveError:
        raise
    except Exception as error:
        first = first_line(error)
        raise UsageError(
            f"{step.name} cannot be run on {piece.rows} of the {piece.total} rows of a batch: "
            f"{type(error).__name__}: {first}",
            hint=_HINT,
            everywhere=False,
        ) from error
    finally:
        step.plan = None
        undo(written)


def _in_one_piece(step: RowStep, inputs: Any, indices: list[int]) -> Trial:
    """The step as one process runs it, undone."""
    total = tf.nest.flatten(inputs)[indices[0]].shape[0]
    noise = keras_compat.FixedNoise(0, total, total)
    applied: list[Any] = []
    updates = _Updates()
    with (
        recorded_writes() as written,
        keras_compat.fixed_noise(noise),
        keras_compat.stock_moments(),
        keras_compat.intercept(updates, live_metrics()) as results,
        keras_compat.record_applied(applied),
    ):
        outputs = step.function(inputs)
    run = local_run(outputs, results, {}, set())
    variables = [w.variable for w in _written(written, updates.updated)]
    trial = Trial(_gradients(applied), _values(variables))
    trial.outputs = [
        {"": _array(leaf)} if is_numeric(leaf) or _is_sparse(leaf) else {}
        for leaf in run.leaves
    ]
    trial.draws = noise.shapes
    undo(written)
    return trial


def _warn_of_draws(step: RowStep, ours: Trial, whole: Trial) -> None:
    """Of draws that depend on how many rows there are, and are not one for each row."""
    for mine, theirs in zip(ours.draws, whole.draws, strict=False):
        if mine != theirs:
            step.job.warn_once(
                step.name, OTHER_DRAWS, f"a random draw of shape {theirs}"
            )


class _Updates(keras_compat.Hooks):
    """One process: nothing is changed. Notes what optimizers write, by id."""

    def __init__(self) -> None:
        self.updated: set[int] = set()

    def on_apply(
        self, optimizer: keras.Optimizer, gradients: list[Any], variables: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Notes what the optimizer writes."""
        self.updated |= written_by(optimizer, variables)
        return gradients, []


def _candidates(
    step: RowStep, run: LocalRun, piece: Piece
) -> list[dict[str, np.ndarray]]:
    """What each returned leaf may be of the whole batch, by rule; the same on all ranks."""
    found: list[dict[str, np.ndarray]] = []
    numeric = [is_numeric(leaf) for leaf in run.leaves]
    own, share = piece.rows, piece.share
    flags = [
        tf.constant(float(n and len(np.shape(v)) > 0 and np.shape(v)[0] == max(own, 1)))
        for n, v in zip(numeric, run.leaves, strict=True)
    ]
    are_rows = [
        bool(f == step.job.backend.size) for f in (step.sums(flags) if flags else [])
    ]
    for i, leaf in enumerate(run.leaves):
        values: dict[str, np.ndarray] = {}
        if i in run.summed:
            values[GLOBAL] = _array(leaf)
        elif numeric[i] and i not in run.sources:
            wide = tf.cast(tf.convert_to_tensor(leaf), tf.float64)
            if are_rows[i]:
                values[ROWS] = gather_rows(
                    step.sums, wide[:own], piece.start, piece.total
                ).numpy()
            else:
                mean, added = step.sums([share.of(wide), share.if_any(wide)])
                integers = not isinstance(leaf, float) and not _is_floating(leaf)
                pair = {MEAN: mean.numpy(), SUM: added.numpy()}
                order = (SUM, MEAN) if integers else (MEAN, SUM)
                values |= {rule: pair[rule] for rule in order}
        found.append(values)
    return found


def _compare(ours: Trial, whole: Trial) -> tuple[str, list[str], bool]:
    """On rank 0: what differs, in words; the rule of each output; whether all are certain."""
    for what, mine, theirs in (
        ("the gradient of", ours.gradients, whole.gradients),
        ("the variable", ours.variables, whole.variables),
    ):
        if list(mine) != list(theirs):
            odd = [*set(mine) ^ set(theirs), "an optimizer"][0].split("|")[0]
            return f"{odd!r} is written in one case only", [], False
        largest = max((np.abs(v).max(initial=0) for v in theirs.values()), default=0)
        for key, value in theirs.items():
            if (by := _distance(mine[key], value, largest)) > 1:
                return (
                    f"{what} {key.split('|')[0]!r} differs {_by(by, value)}",
                    [],
                    False,
                )
    if len(ours.outputs) != len(whole.outputs):
        return "it returns another number of values", [], False
    rules, certain = [], True
    for number, (values, wanted) in enumerate(
        zip(ours.outputs, whole.outputs, strict=True)
    ):
        if not values or not wanted:
            rules.append("")
            continue
        apart = {r: _distance(v, wanted[""], 0) for r, v in values.items()}
        fitting = [rule for rule, distance in apart.items() if distance <= 1]
        if not fitting:
            text = _by(min(apart.values()), wanted[""])
            return f"the value {number + 1} that it returns differs {text}", [], False
        rules.append(fitting[0])
        certain = certain and len(fitting) == 1
    return "", rules, certain


def _distance(mine: np.ndarray, theirs: np.ndarray, largest: float) -> float:
    """How many tolerances two arrays are apart."""
    if mine.shape != theirs.shape:
        return np.inf
    value = theirs.astype(np.float64)
    # What is small beside all others is made of what cancels out.
    scale = max(np.abs(value).max(initial=0), 1e-4 * largest, 1e-30)
    apart = np.abs(mine.astype(np.float64) - value)
    apart = np.where(mine == theirs, 0, apart)  # infinities
    by = apart.max(initial=0) / scale / _tolerance(theirs)
    return float(by) if not np.isnan(by) else (0.0 if np.isnan(value).any() else np.inf)


def _by(distance: float, value: np.ndarray) -> str:
    if not np.isfinite(distance):
        return "in shape, or is not finite"
    return f"by {distance * _tolerance(value):.2g} of its size"


def _tolerance(value: np.ndarray) -> float:
    """Relative rounding that a few operations may add up to."""
    if keras.config.dtype_policy().name.startswith("mixed_"):
        return 0.05
    return 1e-7 if value.dtype == np.float64 and _wide() else 2e-3


def _wide() -> bool:
    return bool(keras.config.floatx() == "float64")


def _gradients(applied: list[Any]) -> Values:
    return {
        f"{keras_compat.path_of(v)}|{name}|{number}": _array(g)
        for number, (name, _, gradients, variables) in enumerate(applied)
        for v, g in zip(variables, gradients, strict=True)
        if g is not None
    }


def _written(written: dict[int, Write], updated: set[int]) -> list[Write]:
    return [
        w
        for w in written.values()
        if id(w.variable) not in updated
        and keras_compat.SEED_STATE not in w.variable.name
        and w.variable.dtype != tf.string
    ]


def _values(variables: list[Any]) -> Values:
    return {f"{v.name}|{i}": _array(v) for i, v in enumerate(variables)}


def _array(value: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(tf.convert_to_tensor(value)))


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, tf.IndexedSlices)


def _is_floating(leaf: Any) -> bool:
    return bool(tf.as_dtype(leaf.dtype).is_floating)
