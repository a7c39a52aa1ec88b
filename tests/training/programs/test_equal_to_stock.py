"""Programs of all kinds train as in stock Keras; many of them once did not, silently.

This file starts itself on ranks, on which Keras trains every program on rank 0, and all ranks
train it together. A launch takes longer than many programs.
"""

from __future__ import annotations

import os

import keras
import pytest

from tests import launch
from tests.training.programs.table import CASES, differences, outcome
from tests.training.small import on_rank_zero

HERE = "tests/training/programs/test_equal_to_stock.py"
MATRIX = pytest.mark.matrix
NAME = os.environ.get(launch.BACKEND, "single")
# In one process the step is Keras' own, so a few programs are enough.
FEW = 16

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.on_ranks]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if launch.launched() or i % FEW == 0 else MATRIX)
        for i, name in enumerate(CASES)
    ],
)
def test_is_as_stock_keras(name, backends_by_name):
    case, backend = CASES[name], backends_by_name(NAME)
    wanted = on_rank_zero(backend, lambda: outcome(case))
    keras.utils.clear_session(free_memory=False)
    assert differences(case, outcome(case, backend), wanted) == []


@pytest.mark.launches
@pytest.mark.parametrize(
    ("backend", "ranks", "step"),
    [
        ("native", 2, 9),  # every ninth program
        pytest.param("native", 2, 1, marks=MATRIX),
        pytest.param("native", 3, 1, marks=MATRIX),
        pytest.param("mpi", 2, 3, marks=MATRIX),
        pytest.param("tf-multiworker", 2, 5, marks=MATRIX),
        pytest.param("horovod", 2, 5, marks=[MATRIX, pytest.mark.horovod]),
    ],
)
def test_on_ranks(backend, ranks, step, tmp_path):
    if backend != "native":
        pytest.importorskip("mpi4py")
    names = [*CASES][::step]
    tests = [f"{HERE}::test_is_as_stock_keras[{name}]" for name in names]
    ended = launch.launch(backend, ranks, tests, tmp_path, seconds=900)
    assert ended.passed() == len(names)
