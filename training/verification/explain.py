"""What a difference means, in the user's words: its cause, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.verification.differences import (
    Difference,
    Outcomes,
    close_logs,
    same_predictions,
    tolerance,
)

SKIP = "verify=False trains nevertheless"


def by_nature(random: bool, normalizing: Sequence[str]) -> list[str]:
    """A line for each part of a model that depends on the number of replicas."""
    notes = []
    if random:
        notes.append(
            "random layers (dropout, noise) draw by replica: their numbers depend on "
            "how many there are"
        )
    if normalizing:
        names = list(dict.fromkeys(normalizing))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notes.append(
            f"BatchNormalization ({names[0]!r}{more}) normalizes by the rows of one "
            "replica, and averages moving statistics over replicas"
        )
    return notes


def failed(error: Exception, sizes: Sequence[int]) -> Difference:
    """The step raises an exception for a piece of the rows."""
    first = (str(error).strip() or type(error).__name__).split("\n")[0]
    text = f"{type(error).__name__}: {first[:300]}"
    return Difference("failure", _words(sizes), "no error", text)


def outside(names: Sequence[str]) -> UsageError:
    """Variables are written that are none of the model's."""
    listed = ", ".join(repr(name) for name in dict.fromkeys(names))
    return UsageError(
        f"a training step of the model writes {listed}, which is none of its variables: "
        "each replica would have a value of its own, and no checkpoint would hold it",
        hint="make it in a layer: self.add_weight(..., trainable=False); or attach the "
        f"SeedGenerator or metric that has it to a layer; {SKIP}",
    )


def cause(
    model: keras.Model,
    difference: Difference,
    outcomes: Outcomes,
    sizes: Sequence[int],
) -> UsageError:
    """The error for a difference that gathering predictions does not mend."""
    allowed, gathered = tolerance(model), outcomes.gathered
    where = " in validation" if difference.validation else ""
    seen = _seen(difference, sizes)
    if not same_predictions(outcomes, allowed):
        return UsageError(
            f"model {model.name!r} couples the rows of a batch{where}: what it predicts "
            f"for a row depends on the rows beside it, and replicas have a part of them "
            f"({seen})",
            hint="let layers compute each row by itself (no mean, sort, softmax or "
            f"reshape over axis 0); one replica has whole batches; {SKIP}",
        )
    if difference.kind == "metric":
        return UsageError(
            f"metric {difference.name!r} is not a sum over rows{where}: {seen}",
            hint="let its variables be sums and counts, updated in update_state, and "
            f"divide in result(); {SKIP}",
        )
    stock_added = outcomes.stock.added
    if gathered is not None and not close_logs(stock_added, gathered.added, allowed):
        layers = ", ".join(repr(name) for name in outcomes.stock.adding)
        return UsageError(
            f"add_loss of layer {layers} is given a value that is not a mean over the "
            f"rows of a batch{where}: {stock_added:.6g} for {sum(sizes)} rows at once, "
            f"{gathered.added:.6g} for {_words(sizes)}",
            hint="give add_loss a mean over the rows, without terms of several rows; "
            f"or compute it in a loss; {SKIP}",
        )
    return _loss_error(model, difference, sizes, where)


def _loss_error(
    model: keras.Model, difference: Difference, sizes: Sequence[int], where: str = ""
) -> UsageError:
    return UsageError(
        f"{_loss(model, difference)} couples the rows of a batch{where}, or is no mean "
        f"over them: it cannot be cut ({_seen(difference, sizes)})",
        hint="return a value for each row, or their mean; one replica without "
        f"accumulate has whole batches; {SKIP}",
    )


def not_keras(
    model: keras.Model, difference: Difference, sizes: Sequence[int]
) -> UsageError:
    """The error where our step differs from Keras' even with all rows at once."""
    names = {
        "loss": _loss(model, difference),
        "gradient": f"the gradient of {difference.name!r}",
        "metric": f"metric {difference.name!r}",
    }
    what = names.get(difference.kind, "the step")
    where = " in validation" if difference.validation else ""
    return UsageError(
        f"{what} differs{where} from that of Keras' own step: "
        f"{_seen(difference, sizes)}",
        hint="write it as a subclass of keras.losses.Loss or keras.metrics.Metric that "
        f"Keras calls itself; {SKIP}",
    )


def refused(
    model: keras.Model, difference: Difference, sizes: Sequence[int]
) -> UsageError:
    """The error for state that replicas cannot have in common."""
    seen = _seen(difference, sizes)
    if difference.kind == "weight":
        return UsageError(
            f"a layer assigns its trainable weight {difference.name!r} in the forward "
            f"pass, which the step drops ({seen})",
            hint="a constraint of the weight, applied after each update, is kept: "
            f"add_weight(constraint=...); {SKIP}",
        )
    return UsageError(
        f"state {difference.name!r} is no mean over rows: it counts or sums them, or "
        f"keeps an extreme, and the step averages the changes of all replicas ({seen})",
        hint=f"keep a mean, or a ratio of means; {SKIP}",
    )


def gather_note(model: keras.Model, difference: Difference) -> str:
    """The line for predictions that are gathered."""
    if difference.kind == "metric":
        return (
            f"metric {difference.name!r} is not a sum over rows: predictions are "
            "gathered from all replicas each step"
        )
    return (
        f"{_loss(model, difference)} couples the rows of a batch: predictions are "
        "gathered from all replicas each step"
    )


def _loss(model: keras.Model, difference: Difference) -> str:
    """What the user calls the loss."""
    if keras_compat.overrides(model, "compute_loss"):
        return f"compute_loss of model {model.name!r}"
    names = keras_compat.loss_names(model)
    if difference.kind == "loss" and difference.name != "loss":
        return f"the loss of output {difference.name!r}"
    if not names:
        return "the loss"
    listed = ", ".join(repr(name) for name in dict.fromkeys(names))
    return f"loss {listed}" if len(set(names)) == 1 else f"one of the losses {listed}"


def _seen(difference: Difference, sizes: Sequence[int]) -> str:
    """The numbers."""
    what = {"loss": "", "metric": "", "failure": ""}.get(
        difference.kind, f"{difference.kind} of {difference.name!r}: "
    )
    if difference.kind == "failure":
        return f"{difference.name}: {difference.own}"
    if len(sizes) == 1:
        return f"{what}{difference.stock} by Keras' own step, {difference.own} by ours"
    return (
        f"{what}{difference.stock} for {sum(sizes)} rows at once, {difference.own} for "
        f"{_words(sizes)}"
    )


def _words(sizes: Sequence[int]) -> str:
    """The pieces: ``pieces of 4, 2 and 1``."""
    if len(sizes) == 1:
        return f"{sizes[0]} rows at once"
    *first, last = map(str, sizes)
    return f"pieces of {', '.join(first)} and {last}"
