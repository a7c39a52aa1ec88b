"""Predicts the time of an all-reduce from a few that were timed.

The model is latency + bytes / bandwidth [R. Hockney, 1994], with one more term for
backends whose calls take longer for each tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        size: Bytes of all tensors of the call together.
        tensors: How many there were.
        seconds: Median time of a call.
    """

    size: int
    tensors: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A line through the measurements of one backend.

    Attributes:
        latency: Seconds of a call.
        each: Seconds more for each of its tensors.
        per_byte: Seconds more for each byte; one over the bandwidth.
    """

    latency: float
    each: float
    per_byte: float

    def seconds(self, sizes: Sequence[int]) -> float:
        """Predicted seconds of one call that sums tensors of these sizes in bytes."""
        return self.latency + self.each * len(sizes) + self.per_byte * sum(sizes)


def fit(points: Sequence[Point]) -> Fit:
    """Least squares of the relative errors, no coefficient below zero.

    Relative, because a prediction 10 % off is as bad at 20 microseconds as at 20
    milliseconds. The constrained optimum is the best of the fits to each subset of
    columns with no negative coefficient, and there are only seven subsets.

    Args:
        points: At least one, with seconds above zero.

    Raises:
        ValueError: Without any.
    """
    if not points or min(p.seconds for p in points) <= 0:
        raise ValueError(f"nothing to fit: {points}")
    seconds = np.array([p.seconds for p in points])
    columns = np.array([[1.0, p.tensors, p.size] for p in points]) / seconds[:, None]
    scale = np.linalg.norm(columns, axis=0)
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for kept in map(list, itertools.combinations(range(3), count)):
            found, *_ = np.linalg.lstsq(
                columns[:, kept] / scale[kept], np.ones(len(points)), rcond=None
            )
            solution = np.zeros(3)
            solution[kept] = found / scale[kept]
            error = float(np.sum((columns @ solution - 1) ** 2))
            if (found >= 0).all() and error < least:
                best, least = solution, error
    return Fit(*best.tolist())
