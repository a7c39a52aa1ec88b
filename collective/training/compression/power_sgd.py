"""PowerSGD: gradients of low rank (Vogels, Karimireddy, Jaggi, 2019).

"PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithms 1 and 2, with warm start and error feedback. With the sum over replicas i
of their gradients M_i (n x m, with the errors of the step before), and Q (m x r) of the
step before:

    P   = sum of M_i Q            one all-reduce of n x r
    P   = an orthonormal basis of its columns
    Q_i = M_i^T P
    Q   = sum of Q_i              one all-reduce of m x r
    sum of M_i  ~  P Q^T

The paper averages gradients. Here they are summed, because they are divided by the weight of
the global batch already. The paper subtracts the same P Q^T, divided by the number of
workers, from every worker's M_i. Here replica i subtracts its own P Q_i^T. Either way the
errors of all replicas add up to sum of M_i - P Q^T exactly. Subtracting the local part has
two advantages: it is a projection of M_i, so no replica's error is larger than its gradient
was; and a replica that leaves takes only an error of its own gradients with it.

Every sum is linear in the M_i. So, up to rounding, the trained model depends neither on the
number of replicas nor on the replica that has an error. It differs from the model of a
training without the hook.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from collective.errors import UsageError
from collective.training.compression.hook import AllReduce, CommunicationHook, Exchanged


@dataclass(frozen=True)
class PowerSGD(CommunicationHook):
    """Sends a matrix of n x m as two of n x rank and m x rank.

    A gradient with more than two dimensions is a matrix of all but the last, by the last.
    Vectors travel whole.

    Args:
        rank: Columns of the two matrices. More columns are more exact, and more bytes.
        min_compression: The least factor by which a gradient must become smaller; other
            gradients travel whole.

    Raises:
        UsageError: A rank below 1.
    """

    rank: int = 4
    min_compression: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(
                f"PowerSGD of rank {self.rank}",
                hint="PowerSGD(rank=4); --hook powersgd:4",
            )

    def compresses(self, shape: Sequence[int]) -> bool:
        """Return whether it has two dimensions or more, and becomes small enough."""
        if len(shape) < 2:
            return False
        n, m = _matrix(shape)
        sent = (n + m) * min(self.rank, n, m)
        return 0 < self.min_compression * sent <= n * m

    def start(self, shape: Sequence[int], index: int) -> list[np.ndarray]:
        """Return Q, of normal numbers: ``[m, rank]``."""
        n, m = _matrix(shape)
        columns = min(self.rank, n, m)
        return [np.random.default_rng(index).standard_normal((m, columns))]

    def exchange(
        self,
        gradients: Sequence[tf.Tensor],
        shared: Sequence[Sequence[tf.Tensor]],
        all_reduce: AllReduce,
    ) -> Exchanged:
        """Run algorithm 1 of the paper for all gradients together, in two messages."""
        matrices = [tf.reshape(g, _matrix(g.shape)) for g in gradients]
        sums = all_reduce([m @ q for m, (q,) in zip(matrices, shared, strict=True)])
        # QR by reflections gives orthonormal columns even if the columns of the sum depend
        # on each other, or are zero, as for a layer without gradient.
        bases = [tf.linalg.qr(p).q for p in sums]
        own = [
            tf.matmul(m, p, transpose_a=True)
            for m, p in zip(matrices, bases, strict=True)
        ]
        factors = all_reduce(own)

        def restored(qs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [
                tf.reshape(tf.matmul(p, q, transpose_b=True), g.shape)
                for p, q, g in zip(bases, qs, gradients, strict=True)
            ]

        return Exchanged(restored(factors), restored(own), [[q] for q in factors])


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]
