"""The record of a model that is ready to train.

``prepare`` makes it once. Step, evaluation, callbacks and checkpoints look it up by the model
(``get_prepared``), and so does a second ``fit``. The record holds no reference to its model and ends with it. Traced steps are not
in it: ``traced.kept_with`` keeps them in an attribute of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import keras

if TYPE_CHECKING:  # at run time, this module must not depend on any variant
    from collective.training.compression.hook_state import HookState


@dataclass(frozen=True)
class PreparedModel:
    """A model, its variables, and what a training keeps beside them."""

    model: keras.Model  # built and compiled, with all variables of its optimizer
    # ``model.trainable_variables`` when it was prepared. The model's own lists have
    # another order after ``layer.trainable`` is set, and Keras' train function does not
    # follow that either.
    trainable: list[keras.Variable]
    state: list[keras.Variable]  # ``model.non_trainable_variables``, likewise
    # The state that a communication hook keeps between steps, or None without a hook.
    hook: HookState | None = None


# By model, the other fields of ``PreparedModel``: without a reference to the model,
# so that the entry ends with it.
_records: WeakKeyDictionary[keras.Model, dict[str, Any]] = WeakKeyDictionary()


def get_prepared(model: keras.Model) -> PreparedModel:
    """Return the record of a model; if it was not prepared, a record of its present state."""
    return PreparedModel(model, **(_records.get(model) or _variables(model)))


def _variables(model: keras.Model) -> dict[str, Any]:
    return {
        "trainable": list(model.trainable_variables),
        "state": list(model.non_trainable_variables),
    }


def get_hook(model: keras.Model) -> HookState | None:
    """Return the state that a hook keeps between steps, or None without a hook."""
    return get_prepared(model).hook


def keep(model: keras.Model, hook: HookState | None = None) -> PreparedModel:
    """Make the record of a model that was prepared, and keep it."""
    _records[model] = _variables(model) | {"hook": hook}
    return get_prepared(model)
