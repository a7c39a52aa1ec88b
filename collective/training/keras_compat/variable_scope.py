"""The scope of a forward pass: what it reads and assigns besides the values it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from collective.training.keras_compat.randomness import is_seed_state
from collective.training.keras_compat.wrapped_functions import (
    ReadingScope,
    refuse_in_block,
    require_variable,
)


class ForwardScope(ReadingScope):
    """A stateless scope for model, loss and metrics.

    A layer may assign a trainable variable (SpectralNormalization does). As in Keras'
    own training step, the gradient is then that of the value assigned, and does not
    flow back through the assignment.

    A seed generator that no layer tracks has its own state, or draws a new seed.

    Args:
        trainable: The trainable variables and their values, which the tape watches.
        state, counted: The others: those of the model, and those in which metrics count.
        draw: Returns the seed (int32, shape [2]) of the n-th untracked generator; None:
            each is what it is.
    """

    def __init__(
        self,
        trainable: Sequence[tuple[keras.Variable, tf.Tensor]],
        state: Sequence[tuple[keras.Variable, tf.Tensor]],
        counted: Iterable[tuple[keras.Variable, tf.Tensor]],
        draw: Callable[[int], tf.Tensor] | None,
        tape: tf.GradientTape | None = None,
    ):
        super().__init__([*trainable, *state, *counted], collect_losses=True)
        # For each trainable variable by index, the values assigned to it.
        self.assigned: dict[int, list[tf.Tensor]] = {}
        # Variables that were assigned and are in neither list.
        self.unknown: list[keras.Variable] = []
        self._indices = {id(v): i for i, (v, _) in enumerate(trainable)}
        # Variables that have the values given; metrics count from zero.
        self._of_model = set(self._indices) | {
            id(v) for v, _ in state if not is_seed_state(v)
        }
        self._known = set(self.state_mapping)
        self._draw, self._seeds = draw, 0
        self._tape = tape

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """What a variable's ``assign`` calls."""
        variable, value = update
        # As in Keras, where a variable stands between what is written and what is read.
        value = tf.stop_gradient(value)
        index = self._indices.get(id(variable))
        if index is not None:
            if self._tape is not None:
                self._tape.watch(value)
            self.assigned.setdefault(index, []).append(value)
        elif id(variable) not in self._known and not is_seed_state(variable):
            self.unknown.append(variable)
        super().add_update((variable, value))

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """What reading a variable calls; None: its own value."""
        if self.reads_variables and self._is_variable(variable):
            return None
        value = super().get_current_value(variable)
        if value is None and self._draw is not None and is_seed_state(variable):
            value = tf.cast(self._draw(self._seeds), variable.dtype)
            self._seeds += 1
            self.state_mapping[id(variable)] = value
        return value

    def _is_variable(self, variable: keras.Variable) -> bool:
        """Whether a variable of the model can be read as such."""
        index = self._indices.get(id(variable))
        if index is not None:
            require_variable(variable, index in self.assigned)
        elif variable.trainable and id(variable) in self.state_mapping:
            refuse_in_block(variable)
        return id(variable) in self._of_model

    def continued(
        self, values: Iterable[tuple[keras.Variable, tf.Tensor]]
    ) -> ForwardScope:
        """A scope that starts from the values of this one.

        Args:
            values: Those of variables that have others in the new scope. A trainable
                variable cannot be assigned there.
        """
        scope = ForwardScope((), (), values, self._draw)
        scope.state_mapping = self.state_mapping | scope.state_mapping
        scope._known = self._known - set(self._indices)
        scope._seeds = self._seeds
        return scope

    def take_over(
        self, scope: ForwardScope, variables: Iterable[keras.Variable]
    ) -> None:
        """Gives variables the values that they have in another scope."""
        for variable in variables:
            self.state_mapping[id(variable)] = scope.state_mapping[id(variable)]

    def values(self, variables: Iterable[keras.Variable]) -> list[tf.Tensor]:
        """The values of variables of either list now."""
        return [self.state_mapping[id(v)] for v in variables]


def variable_writers() -> list[tuple[type[Any], str]]:
    """The methods that write a TensorFlow variable."""
    # A variable that a tf.function has made is a BaseResourceVariable only.
    one = resource_variable_ops.BaseResourceVariable
    owners = (one, resource_variable_ops.ResourceVariable)
    scatters = ("add", "div", "max", "min", "mul", "sub", "update", "nd_add", "nd_sub")
    names = ["assign", "assign_add", "assign_sub"]
    names += [f"scatter_{name}" for name in (*scatters, "nd_update")]
    return [(owner, name) for owner in owners for name in names if name in vars(owner)]
