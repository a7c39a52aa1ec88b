"""Programs that draw at random have the results of ``python`` on N ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests import launch
from tests.training.unedited.random_programs import PROGRAMS

PROGRAM = "tests/training/unedited/random_programs.py"
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# In make test: masks, augmentation, statistics, each kind of generator, an own step.
SOME = ["augmentation", "own_step"]

pytestmark = launch.STARTS_RANKS


@pytest.fixture(scope="session")
def stock(once):
    """Return a folder with the results of stock Keras."""

    def folder(precision: str, names: list[str]) -> Path:
        def train(made: Path) -> None:
            run([sys.executable], made, precision, names)

        return once(f"random-{precision}-{len(names)}", train)

    return folder


def run(start: list[str], folder: Path, precision: str, names: list[str]) -> str:
    arguments = [*start, PROGRAM, str(folder), precision, *names]
    code, printed = launch.run(
        arguments,
        launch.environment(forked=True, PYTHONHASHSEED="0"),
        200 + 20 * len(names),
    )
    assert code == 0, printed
    return printed


def differences(got: Path, wanted: Path, tolerance: float) -> list[str]:
    """Return differences beyond the tolerance, relative to the largest entry."""
    found = []
    with np.load(got) as values, np.load(wanted) as reference:
        assert sorted(values.files) == sorted(reference.files)
        for name in reference.files:
            ours, theirs = values[name].astype(float), reference[name].astype(float)
            least = max(np.abs(theirs).max(initial=0), 0.1)
            error = np.abs(ours - theirs).max(initial=0) / least
            if not error <= tolerance:
                found.append(f"{name}: {error:.2g}")
    return found


def check(folder, stock, ranks, precision, names):
    wanted = stock(precision, names) / "0.npz"
    start = [sys.executable, "-m", "collective.launch", "-np", str(ranks), "--keras"]
    printed = run(start, folder, precision, names)
    assert "warning: model" not in printed
    for rank in range(ranks):
        found = differences(folder / f"{rank}.npz", wanted, TOLERANCE[precision])
        assert found == [], f"rank {rank}"


def test_some_on_two_ranks(tmp_path, stock):
    check(tmp_path, stock, 2, "float64", SOME)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_program(tmp_path, stock, ranks, precision):
    check(tmp_path, stock, ranks, precision, list(PROGRAMS))
