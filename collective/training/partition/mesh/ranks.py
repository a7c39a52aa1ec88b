"""Where the ranks of a job lie on a mesh: in row-major order of its axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from collective.errors import UsageError


def groups_along(sizes: Mapping[str, int], axis: str) -> list[list[int]]:
    """Return the groups of ranks that differ in their place along one axis alone.

    Args:
        sizes: Ranks along each axis, by name.
    """
    names = list(sizes)
    ranks = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    last = np.moveaxis(ranks, names.index(axis), -1)
    return [list(map(int, group)) for group in last.reshape(-1, sizes[axis])]


def place_of(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return the place of a rank along each axis.

    Raises:
        UsageError: The mesh has no such rank.
    """
    count = math.prod(sizes.values())
    if not 0 <= rank < count:
        raise UsageError(
            f"rank {rank} on a mesh of {' x '.join(map(str, sizes.values()))} ranks",
            hint=f"start {count} ranks, or make the mesh of as many as there are",
        )
    places = np.unravel_index(rank, list(sizes.values()))
    return {name: int(place) for name, place in zip(sizes, places, strict=True)}
