"""Where two outcomes of a step differ by more than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from collective.training import keras_compat
from collective.training.keras_compat import StepOutcome
from collective.training.prepared import PreparedModel

# Relative to the norm of a tensor. A loss that is cut wrongly differs by a share of the
# rows, so mostly by some percent; rounding in deep networks reaches a tenth of these.
_TOLERANCES = {"float64": 1e-8, "float32": 1e-4, "float16": 0.03, "bfloat16": 0.08}
# Of the largest gradient: those that are zero but for rounding have no norm of their own.
_FLOOR = 0.1
_TINY = 1e-37
# Losses and metrics are as good as zero below this share of the tolerance.
_SMALL_LOG = 1e-2


@dataclass(frozen=True)
class Difference:
    """One of them.

    Attributes:
        kind: ``loss``, ``metric``, ``gradient``, ``state`` or ``weight``.
        stock, own: Keras' value and ours, in words.
    """

    kind: str
    name: str
    stock: str
    own: str
    validation: bool = False


@dataclass(frozen=True)
class Outcomes:
    """One step, computed in several ways.

    Attributes:
        stock: By Keras, all rows at once.
        own: By us, in pieces; or the exception that this raises.
        whole: By us, in one piece; likewise.
        gathered: By Keras' loss and metrics, on the predictions of all pieces; None
            where that raises an exception.
        found: Where ``own`` differs from ``stock``.
    """

    stock: StepOutcome
    own: StepOutcome | Exception
    whole: StepOutcome | Exception
    gathered: StepOutcome | None
    found: Sequence[Difference]


def tolerance(model: keras.Model) -> float:
    """The relative difference that rounding may make in a model."""
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    dtypes |= {str(v.dtype) for v in model.variables}
    for name in ("bfloat16", "float16", "float32"):
        if name in dtypes:
            return _TOLERANCES[name]
    return _TOLERANCES["float64"]


def differences(
    prepared: PreparedModel,
    stock: StepOutcome,
    own: StepOutcome,
    losses: Sequence[str],
    validation: bool = False,
) -> Iterator[Difference]:
    """What differs, in the order in which it matters to the user.

    Args:
        losses: The names in ``logs`` that are losses, not metrics.
    """
    allowed = tolerance(prepared.model)
    common = [name for name in stock.logs if name in own.logs]
    for name in sorted(common, key=lambda name: name not in losses):
        expected, got = stock.logs[name], own.logs[name]
        if not close_logs(expected, got, allowed):
            kind = "loss" if name in losses else "metric"
            yield Difference(kind, name, _text(expected), _text(got), validation)
    if validation:
        return  # a test step has no gradients, and what it assigns is not kept
    yield from _gradients(prepared.trainable, stock, own, allowed)
    for variable, expected, got in zip(
        prepared.state, stock.state, own.state, strict=False
    ):
        alike = _same_change(variable, expected, got, allowed)
        if not (alike or keras_compat.is_seed_state(variable)):
            yield Difference("state", variable.path, _text(expected), _text(got))
    weights = prepared.trainable
    for i, expected in stock.weights.items():
        got = own.weights[i] if i in own.weights else np.asarray(weights[i])
        if not _close(expected, got, allowed):
            yield Difference("weight", weights[i].path, _text(expected), _text(got))


def _gradients(
    trainable: Sequence[keras.Variable],
    stock: StepOutcome,
    own: StepOutcome,
    allowed: float,
) -> Iterator[Difference]:
    norms = [np.linalg.norm(g) for g in stock.gradients if g is not None]
    floor = _FLOOR * max(norms, default=0.0) * allowed
    for variable, expected, got in zip(
        trainable, stock.gradients, own.gradients, strict=True
    ):
        expected = np.zeros(variable.shape) if expected is None else expected
        got = np.zeros(variable.shape) if got is None else got
        if not _close(expected, got, allowed, floor):
            stock_norm, own_norm = np.linalg.norm(expected), np.linalg.norm(got)
            yield Difference(
                "gradient", variable.path, f"norm {stock_norm:.4g}", f"{own_norm:.4g}"
            )


def close_logs(expected: Any, got: Any, allowed: float) -> bool:
    """Whether two values of a loss or metric are equal to rounding."""
    return _close(expected, got, allowed, allowed * _SMALL_LOG)


def _same_change(
    variable: keras.Variable, expected: Any, got: Any, allowed: float
) -> bool:
    """Whether a variable changes alike: a large value would hide a small change."""
    old = np.asarray(variable, np.float64)
    if not np.all(np.isfinite(old)):
        return _close(expected, got, allowed)
    unit = np.finfo(np.float32 if variable.dtype != "float64" else np.float64).eps
    floor = 8 * float(unit) * float(np.linalg.norm(old))
    with np.errstate(invalid="ignore"):
        return _close(expected - old, got - old, allowed, floor)


def _close(expected: Any, got: Any, allowed: float, floor: float = 0.0) -> bool:
    """Equal to rounding; values that are not finite must be so in the same places."""
    a, b = np.asarray(expected, np.float64), np.asarray(got, np.float64)
    if a.shape != b.shape:
        return False
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    a, b = a[finite], b[finite]
    room = allowed * np.linalg.norm(a) + floor + _TINY
    return bool(np.linalg.norm(a - b) <= room)


def _text(value: Any) -> str:
    array = np.asarray(value, np.float64)
    if array.size == 1:
        return f"{array.item():.6g}"
    return f"an array of norm {np.linalg.norm(array):.6g}"


def same_predictions(outcomes: Outcomes, allowed: float) -> bool:
    """Whether the model predicts a row alike, whatever rows come with it."""
    if outcomes.gathered is None:
        return True
    pairs = zip(outcomes.stock.predictions, outcomes.gathered.predictions, strict=True)
    return all(close_logs(*pair, allowed) for pair in pairs)
