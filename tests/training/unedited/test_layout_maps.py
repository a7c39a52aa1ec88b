"""A script's ``ModelParallel`` trains the model of one process; other layouts are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests import launch

SCRIPT = str(Path(__file__).with_name("model_parallel_script.py"))
FEW, ALL = ["columns_then_rows"], ["columns_then_rows", "rows_of_words", "subclassed"]
pytestmark = launch.STARTS_RANKS


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, FEW),
        pytest.param(2, ALL, marks=pytest.mark.matrix),
        pytest.param(4, ALL, marks=pytest.mark.matrix),
    ],
)
def test_trains_the_model_of_one_process(ranks, names, tmp_path, once):
    def run(start, folder, names):
        words = [*start, SCRIPT, str(folder), *names]
        code, output = launch.run(
            words, launch.environment(forked=True, PYTHONHASHSEED="0"), 300
        )
        assert code == 0, output

    known = "-".join(names)
    stock = once(
        f"model-parallel-{known}", lambda path: run([sys.executable], path, names)
    )
    start = [sys.executable, "-m", "collective.launch", "-np", str(ranks), "--keras"]
    run(start, tmp_path, names)
    for name in names:
        with np.load(stock / f"{name}.0.npz") as wanted:
            for rank in range(ranks):
                with np.load(tmp_path / f"{name}.{rank}.npz") as found:
                    assert sorted(found.files) == sorted(wanted.files)
                    of_callback = {"sampled"} if rank else set()  # it is on rank 0 only
                    for key in set(wanted.files) - of_callback:
                        np.testing.assert_allclose(
                            found[key], wanted[key], rtol=1e-10, atol=1e-12, err_msg=key
                        )
