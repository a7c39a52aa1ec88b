"""Programs of ``examples/distribute/``: on ranks they train the model of one process."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import launch
from tests.training.distribute import run_programs

pytestmark = launch.STARTS_RANKS
SCRIPT = str(Path(run_programs.__file__))
# Programs in make test; the others belong to the matrix.
FEW = ["loop", "fit_own_step", "data_of_one_host"]
BOUND = {"float32": 1e-5, "float64": 1e-10}
CASES = [
    ("native:unedited", 2, "float64", FEW, ()),
    ("native:written:2", 2, "float64", None, pytest.mark.matrix),
    ("mpi:written:2", 2, "float64", None, pytest.mark.matrix),
    *(
        (f"{backend}:{way}", ranks, dtype, None, pytest.mark.matrix)
        for backend in ("native", "mpi", "horovod")
        for way in ("written", "unedited")
        for ranks, dtype in ((2, "float64"), (3, "float32"))
    ),
    ("tf-multiworker:unedited", 2, "float64", None, pytest.mark.matrix),
]


@pytest.mark.parametrize(
    ("how", "ranks", "dtype", "programs"),
    [pytest.param(*case[:4], marks=case[4]) for case in CASES],
)
def test_programs_equal_one_process(how, ranks, dtype, programs, once, tmp_path):
    backend = how.split(":")[0]
    if backend != "native" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no MPI")
    if backend == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod")
    wanted = programs or run_programs.names()

    def run(words, how, folder):
        arguments = [*words, sys.executable, SCRIPT, how, str(folder), *wanted]
        env = launch.environment(forked=True, FLOATX=dtype)
        code, output = launch.run(arguments, env, 540)
        assert code == 0, output

    kind = "few" if programs else "all"
    stock = once(f"stock-{kind}-{dtype}", lambda path: run([], "stock", path))
    run(launch.command(backend, ranks), how, tmp_path)
    for name in wanted:
        for rank in range(ranks):
            found = np.load(os.path.join(tmp_path, f"{name}.{rank}.npz"))
            compare(name, np.load(stock / f"{name}.0.npz"), found, BOUND[dtype])


def compare(name, expected, found, bound):
    """Compare arrays: the largest difference, relative to the largest number of each."""
    assert sorted(found.files) == sorted(expected.files)
    for key in expected.files:
        a, b = expected[key], found[key]
        assert a.shape == b.shape, (name, key)
        worst = np.abs(a - b).max(initial=0) / max(1e-3, np.abs(a).max(initial=0))
        assert worst < bound, (name, key, worst)
