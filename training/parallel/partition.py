"""The variables of a model of which each rank of a tensor group has a part.

A checkpoint has them whole; a new training, and what callbacks do, makes the ranks alike
that have the same part of different replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.memory import partitioned
from collective.training.memory.partitioned import Parted
from collective.training.parallel.layer import Cut


def check(backend: Backend, model: keras.Model, jit_compile: bool) -> None:
    """Refuses, before the model is built, what a tensor group cannot train.

    Raises:
        UsageError: XLA is to compile it, or its optimizer looks at whole variables.
    """
    if jit_compile:
        raise UsageError(
            "XLA compiles no collective, and with --tensor-parallel there are some in "
            "the forward pass",
            hint="drop --jit-compile",
        )
    partitioned.check_optimizer(model, "--tensor-parallel")


class TensorParts(Parted):
    """Parts of large layers, and of the optimizer's state for them.

    Args:
        model: Built and compiled, but for its optimizer, which gets built here.
        backend: One with a tensor group.

    Raises:
        UsageError: No layer is cut.
    """

    def __init__(self, model: keras.Model, backend: Backend):
        super().__init__(model, backend)
        assert backend.tensor is not None
        self.group = backend.tensor
        self._cuts: dict[int, Cut] = {
            id(v): cut
            for v in model.variables
            if (cut := getattr(v, "tensor_cut", None)) is not None
        }
        if not self._cuts:
            raise UsageError(
                f"no layer of model {model.name!r} lies in parts over the "
                f"{self.group.parts} ranks of --tensor-parallel",
                hint="take layers of collective.training.parallel, made within backend.scope() or "
                "by a function given to collective.training.fit; --model transformer has some",
            )
        self._trainable = [id(v) for v in model.trainable_variables]
        slots = keras_compat.build_optimizer(self.optimizer, model.trainable_variables)
        self._cuts |= {
            id(slot): self._cuts[id(v)] for slot, v in slots if id(v) in self._cuts
        }

    def shape_of(self, variable: keras.Variable) -> tuple[int, ...] | None:
        """The whole shape of a variable; None if it is whole."""
        cut = self._cuts.get(id(variable))
        return None if cut is None else cut.shape

    def part_of(self, variable: keras.Variable, value: np.ndarray) -> Any:
        """Of a whole value, what this rank's variable holds."""
        cut = self._cuts.get(id(variable))
        return value if cut is None else cut.part(value, self.group)

    def gather(self) -> dict[int, np.ndarray]:
        """The variables whole, by ``id``; every rank calls it, rank 0 gets it."""
        found = {}
        for variable in self._in_parts():
            whole = self.group.gathered(
                np.asarray(variable), self._cuts[id(variable)].axis
            )
            if self.backend.rank == 0:
                found[id(variable)] = whole
        return found

    def follow(self) -> None:
        """Gives each rank the parts of the first replica."""
        for variable in self._in_parts():
            variable.assign(self.group.follow(np.asarray(variable)))

    def apply(self, gradients: Sequence[tf.Tensor], connected: Sequence[int]) -> None:
        """Inside ``run``: updates weights, whole ones and parts."""
        gradients, _ = self._look_at_all(gradients, connected)
        variables = [self.model.trainable_variables[i] for i in connected]
        keras_compat.apply(self.optimizer, gradients, variables, self.backend.assign)

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        keras_compat.finish(self.model)

    def _in_parts(self) -> list[keras.Variable]:
        every = [*self.model.variables, *self.optimizer.variables]
        return [v for v in every if id(v) in self._cuts]

    def _counts(self, number: int) -> bool:
        return self._trainable[number] in self._cuts or self.group.part == 0

    def _total(self, told: tf.Tensor) -> tf.Tensor:
        return self.group.all_reduce(told)
