"""Loops of a program's own, unedited, on any number of ranks: the numbers of one process.

Programs of examples/loops (with ``--loops``) and examples/distribution compared with stock Keras.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from tests import launch
from tests.training.unedited.keras_programs import EXAMPLES
from tests.training.unedited.test_keras_programs import check
from tests.training.unedited.test_keras_programs import stock as stock  # a fixture

HARD = "tests/training/unedited/hard_loops.py"
NAMES = sorted(
    f.stem for g in ("loops", "distribution") for f in EXAMPLES.glob(f"{g}/*")
)
SOME = ["compiled_step", "keras_on_batch"]

pytestmark = pytest.mark.launches


def test_programs_on_two_ranks(tmp_path, stock):
    check(tmp_path, stock, "native", 2, "float32", SOME, "--loops")


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["native", "mpi"])
def test_every_program(tmp_path, stock, backend, ranks, precision):
    check(tmp_path, stock, backend, ranks, precision, NAMES, "--loops")


@launch.NEEDS_CORE
def test_steps_that_couple_rows_are_those_of_one_process():
    command = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]
    environment = launch.environment(forked=True, PYTHONHASHSEED="0")
    code, printed = launch.run([*command, "--loops", HARD], environment, 200)
    assert code == 0, printed
    assert "has run all of it" not in printed  # because it was partitioned
    code, wanted = launch.run([sys.executable, HARD], environment, 200)
    assert code == 0, wanted
    found, wanted = _numbers(printed), _numbers(wanted)
    assert set(found) == set(wanted) and len(found) == 7, printed
    for name, values in wanted.items():
        np.testing.assert_allclose(
            found[name], values, rtol=1e-5, atol=1e-6, err_msg=name
        )


def _numbers(printed):
    lines = re.findall(r"^(\w+): ([-\d. e+]+)$", printed, re.MULTILINE)
    return {name: np.array(values.split(), float) for name, values in lines}
