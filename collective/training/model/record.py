"""What this package knows of a model, beside the model itself: one record for each.

A record ends with its model, and holds no reference to it. What was traced for a model refers
to it, so that is not here: ``keras_compat.traced.kept_with`` keeps it in an attribute of the
model, which the garbage collector can free with it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

if TYPE_CHECKING:  # at run time, this module must not depend on any variant
    from collective.training.compression.hook_state import HookState


@dataclass
class ModelRecord:
    """The record of a model.

    Attributes:
        trainable: ``model.trainable_variables`` when it was prepared to train; None
            before. The model's own lists have another order after ``layer.trainable`` is
            set, and Keras' train function does not follow that either.
        state: ``model.non_trainable_variables``, likewise.
        hook: What a communication hook keeps between steps, or None without a hook.
        outside: The variables that its step uses and that are not the model's, in the same
            order on all ranks.
        compiled: The objects that ``compile`` has made, when it was first trained.
        flags: Which layers were trainable then.
        per_replica: The option of its last training, for its evaluation.
        said: What was said once of the model.
    """

    trainable: list[keras.Variable] | None = None
    state: list[keras.Variable] | None = None
    hook: HookState | None = None
    outside: list[tf.Variable] = field(default_factory=list)
    compiled: list[weakref.ref[object]] = field(default_factory=list)
    flags: list[bool] = field(default_factory=list)
    per_replica: bool | str = False
    said: set[str] = field(default_factory=set)

    def is_new(self, what: str) -> bool:
        """Return whether something is said for the first time."""
        known = what in self.said
        self.said.add(what)
        return not known


_records: WeakKeyDictionary[keras.Model, ModelRecord] = WeakKeyDictionary()


def record_of(model: keras.Model) -> ModelRecord:
    """Return the record of a model."""
    return _records.setdefault(model, ModelRecord())


def trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the trainable variables of a model, as it was prepared if it was."""
    known = record_of(model).trainable
    return list(model.trainable_variables) if known is None else known


def state_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the other variables of a model, as it was prepared if it was."""
    known = record_of(model).state
    return list(model.non_trainable_variables) if known is None else known


def note_prepared(model: keras.Model, hook: HookState | None = None) -> None:
    """Note the variables of a model that is ready to train.

    Args:
        hook: What a communication hook keeps between the steps of the training.
    """
    record = record_of(model)
    record.trainable = list(model.trainable_variables)
    record.state = list(model.non_trainable_variables)
    record.hook = hook
