"""Programs that do more than add up rows, on virtual replicas: as stock Keras trains them.

Plain, this file trains in one process, and starts itself on 2 and 3 ranks. There each
program is trained by one process, too, with the same bits. Some pieces of the last batch
have no row.
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
from tests.training import hard_programs
from tests.training.against_keras import (
    Program,
    differences,
    trained_by_keras,
    trained_by_us,
)
from tests.training.custom_step import own_steps
from tests.training.custom_step.test_own_steps import assert_as_keras, by_keras, train
from tests.training.small import on_rank_zero

HERE = "tests/training/virtual/test_programs.py"
NAME = os.environ.get(launch.BACKEND, "single")
MATRIX = pytest.mark.matrix
PIECES = {"virtual_replicas": 5}

pytestmark = [pytest.mark.usefixtures("clean_keras"), pytest.mark.trains]


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(NAME)


def normalized() -> keras.Model:
    """Batch statistics, masks, clipping by the sum of all, a loss scale, an average."""
    model = hard_programs.dense(
        keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.4)
    )()
    inner = keras.optimizers.AdamW(0.05, global_clipnorm=0.3, use_ema=True)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


PROGRAMS = {"normalized": Program(normalized), **hard_programs.PROGRAMS}
QUICK = [
    "normalized",
    "without padding",
    "spectral normalization",
    "results are variables",
]
STEPS = ["gan", "masks_and_weights", "own_metrics"]


def some(names, quick):
    """The names, of which few are trained each time."""
    return [n if n in quick else pytest.param(n, marks=MATRIX) for n in names]


@pytest.mark.on_ranks
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=MATRIX)])
@pytest.mark.parametrize("name", some(PROGRAMS, QUICK))
def test_a_program_trains_what_keras_trains(
    name, accumulate, backend, backends_by_name
):
    program = PROGRAMS[name]
    keras.config.set_floatx(program.floatx)
    wanted = on_rank_zero(backend, lambda: trained_by_keras(program))

    def trained(by):
        keras.utils.clear_session(free_memory=False)
        return trained_by_us(program, by, accumulate, **PIECES)

    got = trained(backend)
    assert differences(program, got, wanted) == []
    if backend.size > 1:
        alone = trained(alone_here())
        # Of validation, the sums are equal to rounding.
        names = [name for name in alone if not name.startswith("log val_")]
        assert [n for n in names if not same_bits(got[n], alone[n])] == []


@pytest.mark.on_ranks
@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=MATRIX)])
@pytest.mark.parametrize("name", some(own_steps.PROGRAMS, STEPS))
def test_an_own_step_is_that_on_the_batch(name, accumulate, backend):
    make, options = own_steps.PROGRAMS[name], {"accumulate": accumulate, **PIECES}
    result = train(backend, make, **options)
    assert_as_keras(result, *by_keras(make))
    if backend.size > 1:
        alone = train(alone_here(), make, **options)
        assert result.state_sha256 == alone.state_sha256
        assert result.history == alone.history


def alone_here() -> SingleBackend:
    """Of a rank that trains for itself."""
    return SingleBackend(Options(), Environment())


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("chosen", ["quick", pytest.param("all", marks=MATRIX)])
def test_on_ranks(ranks, chosen, tmp_path):
    tests = [HERE, "-m", "matrix or not matrix" if chosen == "all" else "not matrix"]
    ended = launch.launch("native", ranks, tests, tmp_path, seconds=1500)
    assert ended.passed() >= len(QUICK) + len(STEPS)
