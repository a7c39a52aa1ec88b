"""Programs that do more than add up rows, on virtual replicas, train as in stock Keras.

Plain, this file trains in one process, and starts itself on 2 and 3 ranks. There one process
trains each program, too, with the same bits. Some pieces of the last batch are empty.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest

from collective.backends.options import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from tests import launch
from tests.training.programs import hard, program
from tests.training.programs.table import CASES, Case, differences, outcome
from tests.training.small import on_rank_zero

HERE = "tests/training/virtual/test_virtual_programs.py"
NAME = os.environ.get(launch.BACKEND, "single")
MATRIX = pytest.mark.matrix

pytestmark = [
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.trains,
    pytest.mark.on_ranks,
]


def normalized() -> keras.Model:
    """Return a model with batch statistics, masks, a global clip, a loss scale, an average."""
    model = hard.dense(
        keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.4)
    )()
    inner = keras.optimizers.AdamW(0.05, global_clipnorm=0.3, use_ema=True)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


PROGRAMS = {
    "normalized": Case(normalized, lambda: program.numbers(program.ROWS, 1)),
    **{name: case for name, case in CASES.items() if case.call == "fit"},
}
QUICK = [
    "normalized",
    "without padding",
    "gan, own step",
    "own_metrics, own step",
]


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=MATRIX)])
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=MATRIX) for n in PROGRAMS],
)
def test_a_program_trains_what_keras_trains(name, accumulate, backends_by_name):
    case, backend = PROGRAMS[name], backends_by_name(NAME)
    wanted = on_rank_zero(backend, lambda: outcome(case))
    options = {"virtual_replicas": 5, "accumulate": accumulate}
    got = outcome(case, backend, **options)
    assert differences(case, got, wanted) == []
    if backend.size > 1:
        alone = outcome(case, SingleBackend(Options(), Environment()), **options)
        # The sums of validation are equal to rounding.
        names = [name for name in alone if not name.startswith("val_")]
        assert [n for n in names if not same_bits(got[n], alone[n])] == []


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=MATRIX)])
@pytest.mark.parametrize("chosen", ["quick", pytest.param("all", marks=MATRIX)])
def test_on_ranks(ranks, chosen, tmp_path):
    tests = [HERE, "-m", "matrix or not matrix" if chosen == "all" else "not matrix"]
    ended = launch.launch("native", ranks, tests, tmp_path, seconds=1500)
    assert ended.passed() >= len(QUICK)
