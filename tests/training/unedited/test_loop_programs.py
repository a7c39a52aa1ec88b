"""Loops of a program's own, unedited, on any number of ranks: the numbers of one process.

Programs of examples/loops (with ``--loops``) and examples/distribution beside stock Keras.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests import launch
from tests.training.unedited.keras_programs import EXAMPLES
from tests.training.unedited.test_keras_programs import check
from tests.training.unedited.test_keras_programs import stock as stock  # a fixture

REFUSED = "tests/training/unedited/refused_loops.py"
NAMES = sorted(
    f.stem for g in ("loops", "distribution") for f in EXAMPLES.glob(f"{g}/*")
)
SOME = ["compiled_step", "keras_on_batch"]
WRONG = {
    "pairs": "train_step() on 11 rows cut into 2 pieces .* the gradient of",
    "centred": r"the training step at refused_loops.py:\d+ on 11 rows .* the gradient of",
    "iterator": "train_step() updates a model, and is given no batch",
    "largest": "the variable",
    "returned": "the value 1 that it returns differs",
    "on_batch": "train_step of 'sequential.*the gradient of",
}

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
@pytest.mark.matrix
def test_what_is_no_sum_over_rows_is_refused_by_name():
    command = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]
    code, printed = launch.run(
        [*command, "--loops", REFUSED], launch.environment(), 200
    )
    assert code == 0, printed
    for name, text in WRONG.items():
        line = next(x for x in printed.splitlines() if x.startswith(f"{name}: "))
        assert line.startswith(f"{name}: UsageError"), line
        found = text.replace("()", r"\(\)")
        assert re.search(found, line), line
        assert "HINT: " in line
