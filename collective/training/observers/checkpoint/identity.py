"""Identifies the training of a checkpoint: model, loss, optimizer and data, in short texts.

Equal shapes are not enough: with another activation, optimizer or data set of the same
shapes, the training would continue as if nothing had happened.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from collective.training import keras_compat
from collective.training.input.pipeline import Input
from collective.training.input.ready_batches import ReadyBatches
from collective.training.model.variables import all_variables
from collective.training.verification.descriptions import describe_model
from collective.training.verification.ranks import describe_data

# The plan of the batches and the shapes of variables are compared by themselves; how rows
# are read may change; a new learning rate is taken over (new_rate).
_IGNORED = ("variable ", "kind of ", "batch size ", "seed of ", "shuffle of ")
_RATE = "optimizer: learning_rate"
_VERSIONS = "versions"


def describe(inputs: Input | ReadyBatches, model: keras.Model) -> dict[str, str]:
    """Describe the parts of a training by name; its model is compiled and built."""
    parts = describe_data("training", inputs) | describe_model(model)
    kept = {k: v for k, v in parts.items() if not k.startswith(_IGNORED)}
    rate = keras_compat.optimizers.plain_rate(model.optimizer)
    if rate is not None:
        kept[_RATE] = repr(float(np.asarray(rate)))
    python = ".".join(platform.python_version_tuple()[:2])
    kept[_VERSIONS] = f"Python {python}, Keras {keras.__version__}"
    return kept


def difference(saved: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return the first part in which two trainings differ, as the end of a sentence; or ''.

    Between versions, only parts that both have are compared, and code is not.
    """
    same_versions = saved.get(_VERSIONS) == here.get(_VERSIONS)
    names = [*here, *(n for n in saved if n not in here)]
    for name in names:
        theirs, mine = saved.get(name), here.get(name)
        if theirs == mine or name in (_RATE, _VERSIONS):
            continue
        if not same_versions and _may_differ(theirs, mine):
            continue
        shown = [
            text if len(text or "") <= 100 else "another" for text in (theirs, mine)
        ]
        if name.endswith("rows") or any((t or "#").startswith("#") for t in shown):
            return f"its {name} differ{'' if name.endswith('rows') else 's'}"
        return f"it was made with {name} {shown[0]}, and here it is {shown[1]}"
    return ""


def _may_differ(theirs: str | None, mine: str | None) -> bool:
    both = (theirs or "#", mine or "#")
    return any(text.startswith("#") or "def(" in text for text in both)


def keep_new_rate(
    saved: Mapping[str, str],
    here: Mapping[str, str],
    model: keras.Model,
    values: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], str]:
    """Return a checkpoint's variables with the present learning rate, if it is new.

    A rate that callbacks have changed stays: only a change of the script counts.

    Returns:
        The values, and a message; empty if the rate is the same.
    """
    before, now = saved.get(_RATE), here.get(_RATE)
    changed: list[Any] = list(values)
    if before is None or now is None or before == now:
        return changed, ""
    rate = keras_compat.optimizers.plain_rate(model.optimizer)
    for place, variable in enumerate(all_variables(model)):
        if variable is rate:
            changed[place] = np.asarray(rate).astype(values[place].dtype)
    return changed, f"the learning rate is now {now}; before it was {before}"
