"""The state of a hook between steps: in variables, in checkpoints, in elastic jobs.

Each replica has errors of its own. Only their sum counts: it is the part that all replicas
together have not sent yet. A checkpoint has that sum, and rank 0 continues with it, on any
number of ranks. When the ranks of an elastic job change, each remaining rank keeps its errors. A
rank that dies or leaves takes them with it, and a rank that joins begins with zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training.compression.hook import CommunicationHook, Exchanged
from collective.training.process.object_collectives import total


class HookState:
    """The variables of a hook in one training, for sums of a dtype."""

    def __init__(
        self,
        hook: CommunicationHook,
        trainable: Sequence[keras.Variable],
        dtype: tf.DType,
        backend: Backend,
    ):
        self.hook = hook
        self.backend = backend
        self._trainable = list(trainable)
        shapes = {i: tuple(v.shape) for i, v in enumerate(trainable)}
        compressed = {i: s for i, s in shapes.items() if hook.compresses(s)}
        # The errors of this replica, by the index of the trainable variable.
        self.errors = {
            i: tf.Variable(tf.zeros(shape, dtype), trainable=False)
            for i, shape in compressed.items()
        }
        # The tensors that the hook keeps, by the same index; the same on every replica.
        self.shared = {
            i: [
                tf.Variable(array, trainable=False, dtype=dtype)
                for array in hook.start(shape, i)
            ]
            for i, shape in compressed.items()
        }

    @property
    def common(self) -> list[tf.Variable]:
        """Return the variables of the state that are the same on every replica."""
        return [v for variables in self.shared.values() for v in variables]

    @property
    def variables(self) -> list[tf.Variable]:
        """Return all variables of the state."""
        return [*self.errors.values(), *self.common]

    def index_of(self, variable: Any) -> int:
        """Return a variable's index among the trainable ones, or -1."""
        own = enumerate(self._trainable)
        return next((i for i, v in own if variable is v or variable is v.value), -1)

    def check(self, gradients: Sequence[tuple[Any, tf.Tensor]]) -> None:
        """Refuse a step that computes a compressed gradient more than once.

        Args:
            gradients: The variables of the step, with their gradients.

        Raises:
            UsageError: The error of one gradient would be added to the other.
        """
        times = Counter(self.index_of(variable) for variable, _ in gradients)
        for index in self.errors:
            path = self._trainable[index].path
            if times[index] > 1:
                raise UsageError(
                    f"hook {self.hook!r}: a step computes {times[index]} gradients of "
                    f"{path!r}, and what is left over of one would be added to the other",
                    hint="drop --hook, or add up the losses before tape.gradient",
                )
            if not times[index] and self.backend.rank == 0:
                log.warning(
                    "hook %r: the gradient of %r is not compressed: it comes as single "
                    "look-ups, in a loop or branch, or not at all",
                    self.hook,
                    path,
                )

    def assign(
        self, indices: Sequence[int], inputs: Sequence[tf.Tensor], done: Exchanged
    ) -> None:
        """Write the state for the next step; called in ``Backend.run``.

        Args:
            indices: The indices of the variables.
            inputs: The gradients that the hook has exchanged.
        """
        for i, given, sent, shared in zip(
            indices, inputs, done.sent, done.shared, strict=True
        ):
            self.errors[i].assign(given - sent)
            for variable, value in zip(self.shared[i], shared, strict=True):
                variable.assign(value)

    def gather(self) -> dict[int, np.ndarray]:
        """Return the errors' sums over all replicas, by ``id`` of the variable; a collective."""
        return {
            id(v): self._total(v.numpy()).astype(v.dtype.as_numpy_dtype)
            for v in self.errors.values()
        }

    @cached_property
    def _total(self) -> Callable[[np.ndarray], np.ndarray]:
        return total(self.backend)

    def values(self, gathered: Mapping[int, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the state by name, with the errors that have been gathered."""
        found = {
            f"shared {i}.{place}": v.numpy()
            for i, variables in self.shared.items()
            for place, v in enumerate(variables)
        }
        return found | {
            f"error {i}": gathered[id(v)]
            for i, v in self.errors.items()
            if id(v) in gathered
        }

    def put(self, values: Mapping[str, np.ndarray]) -> None:
        """Continue with values of ``values``; rank 0 gets all errors."""
        for i, variables in self.shared.items():
            for place, variable in enumerate(variables):
                if (name := f"shared {i}.{place}") in values:
                    variable.assign(values[name])
        for i, error in self.errors.items():
            if (name := f"error {i}") in values:
                share = values[name] if self.backend.rank == 0 else 0 * values[name]
                error.assign(share)

    def forget(self) -> None:
        """Forget this replica's errors."""
        for error in self.errors.values():
            error.assign(tf.zeros_like(error))
