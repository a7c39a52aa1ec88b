"""Exchanges between processes, through the backend; mostly of small arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training.keras_compat.traced import traced


def total(backend: Backend) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that sums arrays of one shape over the processes.

    It sums in float64, so whole numbers below 2**53 arrive exactly. No process can have the
    sum before all have given their arrays, so the function is a barrier, too.
    """

    @traced
    def summed(array: tf.Tensor) -> tf.Tensor:
        return backend.run(lambda a: backend.all_reduce([a])[0], (array,))

    def sums(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array, np.float64)
        return array if backend.size == 1 else summed(tf.constant(array)).numpy()

    return sums


def gather(backend: Backend, mine: np.ndarray | float) -> np.ndarray:
    """Return every process' array: float64 ``[size, ...]``, in the order of the ranks."""
    rows = np.zeros((backend.size, *np.shape(mine)))
    rows[backend.rank] = mine
    return total(backend)(rows)


def gather_few(backend: Backend, mine: Sequence[float]) -> np.ndarray:
    """Gather a few numbers from each process by one broadcast from each.

    It builds no graph, so it can also be used after the ranks have changed, when the graph
    of ``gather`` would have the old number of processes.
    """
    own = np.asarray(mine, np.float64)
    return np.stack([backend.broadcast_array(own, r) for r in range(backend.size)])


def broadcast_object(backend: Backend, value: Any, root: int = 0) -> Any:
    """Return the root's object on every process; every process calls it.

    ``pickle`` must be able to write it; the memory of arrays in it is sent as it is.
    """
    parts: list[Any] = []
    if backend.rank == root:
        text = pickle.dumps(value, protocol=5, buffer_callback=parts.append)
        parts = [np.frombuffer(text, np.uint8)] + [
            np.frombuffer(part.raw(), np.uint8) for part in parts
        ]
    count = int(backend.broadcast_array(np.array([len(parts)]), root)[0])
    sizes = np.array([part.size for part in parts] or [0] * count)
    sizes = backend.broadcast_array(sizes, root)
    parts = parts or [np.empty(size, np.uint8) for size in sizes]
    parts = [backend.broadcast_array(part, root) for part in parts]
    return pickle.loads(parts[0], buffers=parts[1:])


def join(tensors: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
    """Join tensors that travel together along an axis; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis)
