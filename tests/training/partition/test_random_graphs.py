"""Random graphs, each against the whole; ``GRAPHS=500 SEED=3 pytest ...`` tries others."""

from __future__ import annotations

import os

import pytest

from tests.training.partition.operands import BLOCKS, Operands, check, generator
from tests.training.partition.random_graphs import WIDTH, random_graph

_GRAPHS = int(os.environ.get("GRAPHS", 24))
_SEED = 10_000 * int(os.environ.get("SEED", 0))
_AT_ONCE = 4  # which share what it costs to trace them


@pytest.mark.parametrize("first", range(0, _GRAPHS, _AT_ONCE))
def test_random_graphs(first: int) -> None:
    seeds = [_SEED + first + i for i in range(_AT_ONCE)]
    operands = Operands(generator(first), BLOCKS[first // _AT_ONCE % len(BLOCKS)])
    operands = operands.sharded([WIDTH]).whole([3, WIDTH]).sharded([WIDTH])
    functions = {str(seed): random_graph(seed) for seed in seeds}
    check(operands, functions, derivatives=first % 3 // 2, tolerance=1e-7)
