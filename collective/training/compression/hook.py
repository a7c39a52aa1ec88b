"""What a communication hook has to do: the class to derive one from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

AllReduce = Callable[[Sequence[Any]], list[Any]]
"""Sums tensors of equal shapes over all replicas; every replica calls it alike."""


class Exchanged(NamedTuple):
    """What a hook has made of the gradients of one step.

    Attributes:
        totals: For each gradient, what the optimizer takes for its sum over all replicas:
            the same bits on every replica.
        sent: For each gradient, what of it is in the total. Over all replicas, ``sent``
            adds up to ``totals``; the rest is added to this replica's next gradient.
        shared: The new values of what the hook keeps; the same bits on every replica.
    """

    totals: list[Any]
    sent: list[Any]
    shared: list[list[Any]]


class CommunicationHook(ABC):
    """Sums gradients approximately, with fewer bytes.

    The step gives a hook the gradients of a replica, and does the rest: gradients that the
    hook does not compress are summed as usual, and what was not sent of a gradient is added
    to the next one (error feedback). A hook gets all gradients of a step in one call, so
    that what it sends of them travels together.

    Gradients come as contributions to the gradient of the global loss: divided by the
    weight of the *global* batch already. Their sum over replicas is that gradient. So the
    error of one step has the right unit in the next, whatever the numbers of rows of the
    two batches and of the replica's shares.

    A hook is compared between ranks and named in all outputs by its ``repr``.
    """

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"

    @abstractmethod
    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether gradients of this shape are compressed."""

    @abstractmethod
    def start(self, shape: Sequence[int], index: int) -> list[np.ndarray]:
        """What the hook keeps of such a gradient from step to step, at first.

        Args:
            shape: Of the gradient.
            index: Of its variable among the trainable ones.

        Returns:
            Arrays, the same on every rank; may be none. Checkpoints have them, and a rank
            that joins an elastic job gets them.
        """

    @abstractmethod
    def exchange(
        self,
        gradients: Sequence[Any],
        shared: Sequence[Sequence[Any]],
        all_reduce: AllReduce,
    ) -> Exchanged:
        """Sums the gradients; in TensorFlow's graph, on every replica.

        Args:
            gradients: This replica's, with the errors of the step before: float32,
                or float64 where the model has such variables. Static shapes.
            shared: For each gradient, the tensors that ``start`` began with.
            all_reduce: The only way to other replicas. The first call also takes along
                what a step sums besides gradients; each further call is one more message.
        """
