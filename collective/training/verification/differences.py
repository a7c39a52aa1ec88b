"""Where two outcomes of a step differ by more than rounding, and what it means.

In the user's words: the cause of a difference, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np

from collective.errors import UsageError, first_line
from collective.training import keras_compat
from collective.training.keras_compat import StepOutcome
from collective.training.prepared import PreparedModel
from collective.training.verification.settings import products_of_float32

# Relative to the norm of a tensor. A loss that is cut wrongly differs by a share of the
# rows, so mostly by some percent; rounding in deep networks reaches a tenth of these.
_TOLERANCES = {
    "float64": 1e-8,
    "float32": 1e-4,
    "tensorfloat32": 0.01,
    "float16": 0.03,
    "bfloat16": 0.08,
}
# Of the largest gradient: those that are zero but for rounding have no norm of their own.
_FLOOR = 0.1
_TINY = 1e-37
_SAMPLED = 4096
# Of updates: relative, and the least share of the largest gradient to look at.
_UPDATE, _CLEAR = 0.02, 0.05
# Losses and metrics are as good as zero below this share of the tolerance.
_SMALL_LOG = 1e-2


@dataclass(frozen=True)
class Difference:
    """One difference between two outcomes of a step."""

    kind: str  # ``loss``, ``metric``, ``gradient``, ``state`` or ``weight``
    name: str
    # stock, own: Keras' value and ours, in words.
    stock: str
    own: str
    validation: bool = False

    @property
    def where(self) -> str:
        """For a message."""
        return " in validation" if self.validation else ""


@dataclass(frozen=True)
class Outcomes:
    """One step, computed in several ways."""

    training: bool
    stock: StepOutcome  # by Keras, all rows at once
    own: StepOutcome | Exception  # by us, in pieces; or the exception that this raises
    whole: StepOutcome | Exception  # by us, in one piece; likewise
    # By Keras' loss and metrics, on the predictions of all pieces; None where that
    # raises an exception.
    gathered: StepOutcome | None
    found: Sequence[Difference]  # where ``own`` differs from ``stock``


def tolerance(model: keras.Model) -> float:
    """The relative difference that rounding may make in a model."""
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    dtypes |= {str(v.dtype) for v in model.variables}
    return rounding(dtypes)


def rounding(dtypes: Collection[str]) -> float:
    """The relative difference that rounding to these types may make."""
    for name in ("bfloat16", "float16", "float32"):
        if name in dtypes:
            return _TOLERANCES[products_of_float32() if name == "float32" else name]
    return _TOLERANCES["float64"]


class Pair(NamedTuple):
    """One tensor in two outcomes of a step."""

    kind: str  # ``loss``, ``metric``, ``gradient``, ``state``, ``weight`` or ``log``
    name: str
    expected: Any
    got: Any
    before: Any = None  # the variable, of what is compared by its change


def differing(
    pairs: Iterable[Pair], allowed: float, validation: bool = False
) -> Iterator[Difference]:
    """The pairs that differ by more than rounding, in their order."""
    pairs = list(pairs)
    norms = [np.linalg.norm(p.expected) for p in pairs if p.kind == "gradient"]
    floor = _FLOOR * max(filter(np.isfinite, norms), default=0.0) * allowed
    for kind, name, expected, got, before in pairs:
        if kind in ("loss", "metric", "log"):
            alike = close_logs(expected, got, allowed)
        elif before is not None:
            alike = _same_change(before, expected, got, allowed)
        else:
            alike = _close(expected, got, allowed, floor * (kind == "gradient"))
        if not alike:
            yield Difference(kind, name, _text(expected), _text(got), validation)


def differences(
    prepared: PreparedModel,
    stock: StepOutcome,
    own: StepOutcome,
    losses: Sequence[str],
    allowed: float,
    validation: bool = False,
) -> Iterator[Difference]:
    """What differs, in the order in which it matters to the user.

    Args:
        losses: The names in ``logs`` that are losses, not metrics.
        allowed: The relative difference that is rounding.
    """
    pairs = _pairs(prepared, stock, own, losses, validation)
    yield from differing(pairs, allowed, validation)


def _pairs(
    prepared: PreparedModel,
    stock: StepOutcome,
    own: StepOutcome,
    losses: Sequence[str],
    validation: bool,
) -> Iterator[Pair]:
    common = [name for name in stock.logs if name in own.logs]
    for name in sorted(common, key=lambda name: name not in losses):
        kind = "loss" if name in losses else "metric"
        yield Pair(kind, name, stock.logs[name], own.logs[name])
    if validation:
        return  # a test step has no gradients, and what it assigns is not kept
    weights = prepared.trainable
    for variable, expected, got in zip(
        weights, stock.gradients, own.gradients, strict=True
    ):
        expected = np.zeros(variable.shape) if expected is None else expected
        got = np.zeros(variable.shape) if got is None else got
        yield Pair("gradient", variable.path, expected, got)
    for variable, old, new in zip(prepared.state, stock.state, own.state, strict=False):
        if not keras_compat.is_seed_state(variable):
            yield Pair("state", variable.path, old, new, variable)
    for i, expected in stock.weights.items():
        got = own.weights[i] if i in own.weights else np.asarray(weights[i])
        yield Pair("weight", weights[i].path, expected, got)


def updates(
    trainable: Sequence[keras.Variable],
    before: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray | None],
    stock: Sequence[np.ndarray],
    own: Sequence[np.ndarray],
    allowed: float = _UPDATE,
) -> Iterator[Difference]:
    """Where weights after some updates differ by more than rounding can make of it.

    An optimizer that divides by the size of a gradient makes much of one that is zero
    but for rounding: entries with a small gradient are left out.

    Args:
        before: The weights before.
        gradients: Those of the first update.
        allowed: What rounding may make of gradients.
    """
    largest = max(np.abs(g).max(initial=0) for g in gradients if g is not None)
    for variable, old, gradient, expected, got in zip(
        trainable, before, gradients, stock, own, strict=True
    ):
        if gradient is None:
            continue
        chosen = np.abs(gradient) > _CLEAR * max(np.abs(gradient).max(), largest)
        change, other = (expected - old)[chosen], (got - old)[chosen]
        if not _close(change, other, max(_UPDATE, allowed)):
            size = np.linalg.norm(change), np.linalg.norm(other)
            yield Difference(
                "update", variable.path, f"norm {size[0]:.4g}", f"{size[1]:.4g}"
            )


def sampled(values: np.ndarray) -> np.ndarray:
    """Some entries of a large array, as a vector; all of a small one."""
    flat = np.reshape(values, -1)
    return np.array(flat[:: max(1, flat.size // _SAMPLED)])


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
    return f"norm {np.linalg.norm(array):.6g}"


def same_predictions(outcomes: Outcomes, allowed: float) -> bool:
    """Whether the model predicts a row alike, whatever rows come with it."""
    if outcomes.gathered is None:
        return True
    pairs = zip(outcomes.stock.predictions, outcomes.gathered.predictions, strict=True)
    return all(close_logs(*pair, allowed) for pair in pairs)


def by_nature(normalizing: Sequence[str]) -> list[str]:
    """A line for each part of a model that depends on the number of replicas."""
    notes = []
    if normalizing:
        names = list(dict.fromkeys(normalizing))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notes.append(
            f"BatchNormalization ({names[0]!r}{more}) normalizes by the rows of one "
            "replica, and averages moving statistics over replicas"
        )
    return notes


def left_out(
    model: keras.Model, stock: Collection[str], own: Collection[str]
) -> list[str]:
    """A line where Keras' own step returns numbers that ours does not know."""
    names = [name for name in stock if name not in own]
    if not names:
        return []
    listed = ", ".join(map(repr, names))
    return [
        f"compute_metrics of model {model.name!r} returns {listed}, which no metric has as "
        "its result: logs and History are without it. Make it a keras.metrics.Metric, or "
        "whole_batch=True"
    ]


def _refusal(text: str, hint: str) -> UsageError:
    return UsageError(text, hint=f"{hint}; verify=False trains nevertheless")


def outside(names: Sequence[str]) -> UsageError:
    """Variables are written that are none of the model's."""
    listed = ", ".join(repr(name) for name in dict.fromkeys(names))
    return _refusal(
        f"a training step of the model writes {listed}, which is none of its variables: "
        "each replica would have a value of its own, and no checkpoint would hold it",
        "make it in a layer: self.add_weight(..., trainable=False); or attach the "
        "SeedGenerator or metric that has it to a layer",
    )


@dataclass(frozen=True)
class Explanation:
    """Of the differences of a model whose rows are cut into pieces of these sizes."""

    model: keras.Model
    sizes: Sequence[int]
    allowed: float  # the relative difference that is rounding

    def failed(self, error: Exception) -> Difference:
        """The step raises an exception for a piece of the rows."""
        first = first_line(error) or type(error).__name__
        text = f"{type(error).__name__}: {first[:300]}"
        return Difference("failure", self._pieces, "no error", text)

    def cause(self, difference: Difference, outcomes: Outcomes) -> UsageError:
        """The error for a difference that gathering predictions does not remove."""
        allowed, gathered = self.allowed, outcomes.gathered
        where, seen = difference.where, self._seen(difference)
        if not same_predictions(outcomes, allowed):
            return _refusal(
                f"model {self.model.name!r} couples the rows of a batch{where}: what it "
                f"predicts for a row depends on the rows beside it, and replicas have a "
                f"part of them ({seen})",
                "whole_batch=True (--set whole_batch=True): rank 0 computes whole batches "
                "alone; or let layers compute each row by itself (no mean, sort, softmax "
                "or reshape over axis 0)",
            )
        if difference.kind == "metric":
            return _refusal(
                f"metric {difference.name!r} is not a sum over rows{where}: {seen}",
                "let its variables be sums and counts, updated in update_state, and "
                "divide in result()",
            )
        added = outcomes.stock.added
        if gathered is not None and not close_logs(added, gathered.added, allowed):
            layers = ", ".join(repr(name) for name in outcomes.stock.adding)
            return _refusal(
                f"add_loss of layer {layers} is given a value that is not a mean over "
                f"the rows of a batch{where}: {added:.6g} for {sum(self.sizes)} rows at "
                f"once, {gathered.added:.6g} for {self._pieces}",
                "give add_loss a mean over the rows, without terms of several rows; or "
                "compute it in a loss",
            )
        return _refusal(
            f"{self._loss(difference)} couples the rows of a batch{where}, or is not a mean "
            f"over them: it cannot be cut ({seen})",
            "return a value for each row, or their mean; one replica without accumulate "
            "has whole batches, and so has rank 0 with whole_batch=True",
        )

    def not_keras(self, difference: Difference) -> UsageError:
        """The error where our step differs from Keras' even with all rows at once."""
        names = {
            "loss": self._loss(difference),
            "update": f"the optimizer's update of {difference.name!r}",
            "gradient": f"the gradient of {difference.name!r}",
            "metric": f"metric {difference.name!r}",
        }
        what = names.get(difference.kind, "the step")
        return _refusal(
            f"{what} differs{difference.where} from that of Keras' own step: "
            f"{self._seen(difference)}",
            "write it as a subclass of keras.losses.Loss or keras.metrics.Metric that "
            "Keras calls itself",
        )

    def refused(self, difference: Difference) -> UsageError:
        """The error for state that replicas cannot have in common."""
        seen = self._seen(difference)
        if difference.kind == "weight":
            return _refusal(
                f"a layer assigns its trainable weight {difference.name!r} in the "
                f"forward pass, which the step drops ({seen})",
                "a constraint of the weight, applied after each update, is kept: "
                "add_weight(constraint=...)",
            )
        return _refusal(
            f"state {difference.name!r} is not a mean over rows: it counts or sums them, or "
            f"keeps an extreme, and the step averages the changes of all replicas "
            f"({seen})",
            "keep a mean, or a ratio of means; or whole_batch=True: rank 0 computes whole "
            "batches alone",
        )

    def gather_note(self, difference: Difference) -> str:
        """The line for predictions that are gathered."""
        what = f"{self._loss(difference)} couples the rows of a batch"
        if difference.kind == "metric":
            what = f"metric {difference.name!r} is not a sum over rows"
        return f"{what}: predictions are gathered from all replicas each step"

    def _loss(self, difference: Difference) -> str:
        """What the user calls the loss."""
        if keras_compat.overrides(self.model, "compute_loss"):
            return f"compute_loss of model {self.model.name!r}"
        if difference.kind == "loss" and difference.name != "loss":
            return f"the loss of output {difference.name!r}"
        names = list(dict.fromkeys(keras_compat.loss_names(self.model)))
        if not names:
            return "the loss"
        listed = ", ".join(map(repr, names))
        return f"loss {listed}" if len(names) == 1 else f"one of the losses {listed}"

    def _seen(self, difference: Difference) -> str:
        """The numbers."""
        stock, own = difference.stock, difference.own
        if difference.kind == "failure":
            return f"{difference.name}: {own}"
        what = f"{difference.kind} of {difference.name!r}: "
        if difference.kind in ("loss", "metric"):
            what = ""
        if len(self.sizes) == 1:
            return f"{what}{stock} by Keras' own step, {own} by ours"
        rows = sum(self.sizes)
        return f"{what}{stock} for {rows} rows at once, {own} for {self._pieces}"

    @property
    def _pieces(self) -> str:
        """In words: ``pieces of 4, 2 and 1``."""
        if len(self.sizes) == 1:
            return f"{self.sizes[0]} rows at once"
        *first, last = map(str, self.sizes)
        return f"pieces of {', '.join(first)} and {last}"
