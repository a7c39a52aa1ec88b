"""Two ranks that are threads of this process, and meet in each exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from collective.training.partition.backend_exchange import BackendExchange
from collective.training.partition.emission import Traffic
from collective.training.partition.layouts import ROWS
from collective.training.partition.partition import Partition
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share

RANKS = 2
#: Seconds after which a rank that waits for the other in vain fails.
PATIENCE = 60


class Meeting:
    """Where the ranks add up what each of them brings."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=PATIENCE)
        self._brought: list[list[np.ndarray]] = [[] for _ in range(RANKS)]

    def total(self, rank: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The sums over both ranks, which must bring arrays of the same shapes."""
        self._brought[rank] = list(arrays)
        self._barrier.wait()
        first, second = self._brought
        shapes = [[a.shape for a in brought] for brought in self._brought]
        self._barrier.wait()
        assert shapes[0] == shapes[1], f"the ranks meet with {shapes}"
        return [a + b for a, b in zip(first, second, strict=True)]


class MeetingBackend(SingleBackend):
    """One of the two ranks."""

    def __init__(self, rank: int, meeting: Meeting):
        super().__init__(Options(), Environment())
        self.rank, self.size = rank, RANKS
        self.replicas, self.local_replicas = RANKS, range(rank, rank + 1)
        self._meeting = meeting

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        def meet(*arrays: np.ndarray) -> list[np.ndarray]:
            return self._meeting.total(self.rank, arrays)

        sums = tf.numpy_function(meet, tensors, [t.dtype for t in tensors])
        for total, tensor in zip(sums, tensors, strict=True):
            total.set_shape(tensor.shape)
        return list(sums)


def on_two_ranks(
    function: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    x: np.ndarray,
    counts: Sequence[int],
) -> list[list[np.ndarray]]:
    """What each rank gets of a function of a batch, of which it has so many rows."""
    meeting = Meeting()
    spec = tf.TensorSpec([None, *x.shape[1:]], tf.as_dtype(x.dtype))
    traced = tf.function(
        lambda x: [tf.identity(t) for t in function(x)], autograph=False
    ).get_concrete_function(spec)
    ends = np.cumsum([0, *counts])

    def emitted(rank: int) -> Any:
        partition = Partition(traced, [ROWS], Rows.unknown(len(x)))
        exchange = BackendExchange(MeetingBackend(rank, meeting))

        def emit(own: tf.Tensor) -> list[tf.Tensor]:
            first, count, total = (
                tf.constant(n, tf.int64) for n in (ends[rank], counts[rank], len(x))
            )
            share = Share.of(total, [(first, count, tf.constant(rank == 0))])
            made, _ = partition.emit([[own]], share, exchange, Traffic())
            return [tensors[0] for tensors in made]

        return tf.function(emit, autograph=False).get_concrete_function(spec)

    functions = [emitted(rank) for rank in range(RANKS)]

    def run(rank: int) -> list[np.ndarray]:
        own = x[ends[rank] : ends[rank + 1]]
        return [t.numpy() for t in functions[rank](tf.constant(own))]

    with ThreadPoolExecutor(RANKS) as ranks:
        return list(ranks.map(run, range(RANKS)))
