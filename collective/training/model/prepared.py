"""The record of a model that is ready to train.

``prepare`` makes it once. Step, evaluation, callbacks and checkpoints look it up by the model
(``get_prepared``), and so does a second ``fit``, which continues with the same shards and
devices. The record holds no reference to its model and ends with it. Traced steps are not
in it: ``traced.kept_with`` keeps them in an attribute of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import keras

if TYPE_CHECKING:  # at run time, this module must not depend on any variant
    from collective.training.compression.hook_state import HookState
    from collective.training.parallel.layer_placement import Placement
    from collective.training.parallel.tensor_parallel_variables import (
        TensorParallelVariables,
    )


@dataclass(frozen=True)
class PreparedModel:
    """A model, its variables, and how they are cut or placed."""

    model: keras.Model  # built and compiled, with all variables of its optimizer
    # ``model.trainable_variables`` when it was prepared. The model's own lists have
    # another order after ``layer.trainable`` is set, and Keras' train function does not
    # follow that either.
    trainable: list[keras.Variable]
    state: list[keras.Variable]  # ``model.non_trainable_variables``, likewise
    # The variables that tensor-parallel ranks have shards of, or None without such ranks.
    partition: TensorParallelVariables | None = None
    # The device of each layer, or None if all are on the default device.
    placement: Placement | None = None
    # The state that a communication hook keeps between steps, or None without a hook.
    hook: HookState | None = None

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Have parts of the model that are traced inside run where the placement puts them."""
        if self.placement is None:
            yield
            return
        with self.placement.operations_beside_inputs(), self.placement.layer_calls():
            yield

    @contextlib.contextmanager
    def trains(self) -> Iterator[None]:
        """Do what ``placed`` does, and tell the optimizer the placement and the shards."""
        with contextlib.ExitStack() as inside:
            inside.enter_context(self.placed())
            for part in (self.placement, self.partition):
                if part is not None:
                    inside.enter_context(part.updates(self.model.optimizer))
            yield


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


def get_partition(model: keras.Model) -> TensorParallelVariables | None:
    """Return the variables that are sharded over tensor-parallel ranks, or None."""
    return get_prepared(model).partition


def get_hook(model: keras.Model) -> HookState | None:
    """Return the state that a hook keeps between steps, or None without a hook."""
    return get_prepared(model).hook


def keep(
    model: keras.Model,
    partition: TensorParallelVariables | None,
    placement: Placement | None,
    hook: HookState | None = None,
) -> PreparedModel:
    """Make the record of a model that was prepared, and keep it."""
    _records[model] = _variables(model) | {
        "partition": partition,
        "placement": placement,
        "hook": hook,
    }
    return get_prepared(model)
