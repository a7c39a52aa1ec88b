"""The interface of a communication hook: the base class of all hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

AllReduce = Callable[[Sequence[Any]], list[Any]]
"""Sums tensors of equal shapes over all replicas; every replica calls it alike."""


class Exchanged(NamedTuple):
    """The results of a hook for the gradients of one step.

    Attributes:
        totals: For each gradient, the value that the optimizer takes as its sum over all
            replicas; the same bits on every replica.
        sent: For each gradient, the part of it that is in the total. Over all replicas,
            ``sent`` adds up to ``totals``; the rest is added to this replica's next
            gradient.
        shared: The new values of the tensors that the hook keeps; the same bits on every
            replica.
    """

    totals: list[Any]
    sent: list[Any]
    shared: list[list[Any]]


class CommunicationHook(ABC):
    """Sums gradients approximately, with fewer bytes.

    The step gives a hook the gradients of a replica, and does the rest: gradients that the
    hook does not compress are summed as usual, and the part of a gradient that was not sent
    is added to the next one (error feedback). A hook gets all gradients of a step in one
    call, so that their compressed forms travel together.

    Gradients come as contributions to the gradient of the global loss: divided by the
    weight of the *global* batch already. Their sum over replicas is that gradient. So the
    error of one step has the right unit in the next, even if the batches, or the replica's
    parts of them, have different numbers of rows.

    A hook is compared between ranks and named in all outputs by its ``repr``.
    """

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"

    @abstractmethod
    def compresses(self, shape: Sequence[int]) -> bool:
        """Return whether gradients of this shape are compressed."""

    @abstractmethod
    def start(self, shape: Sequence[int], index: int) -> list[np.ndarray]:
        """Return the first values of the tensors that the hook keeps for such a gradient.

        Args:
            shape: The shape of the gradient.
            index: The place of its variable among the trainable ones.

        Returns:
            Arrays, the same on every rank; the list may be empty. Checkpoints contain
            them, and a rank that joins an elastic job gets them.
        """

    @abstractmethod
    def exchange(
        self,
        gradients: Sequence[Any],
        shared: Sequence[Sequence[Any]],
        all_reduce: AllReduce,
    ) -> Exchanged:
        """Sum the gradients in TensorFlow's graph, on every replica.

        Args:
            gradients: This replica's gradients, with the errors of the step before, of
                static shapes: float32, or float64 if the model has such variables.
            shared: For each gradient, the present values of the tensors from ``start``.
            all_reduce: The only way to other replicas. The first call takes along all other
                sums of a step; each further call is one more message.
        """
