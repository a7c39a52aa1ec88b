"""The program of ``compare.py`` for each backend, on ranks: rank 0 writes one file."""

import sys

import numpy as np
import pytest

from tests import launch


@launch.NEEDS_CORE
@pytest.mark.launches
def test_two_ranks_record_what_one_process_does(tmp_path):
    program = [sys.executable, "-m", "collective.comparison.trace"]
    options = [
        "--model",
        "mlp",
        "--optimizer",
        "sgd",
        "--precision",
        "float64",
        "--steps",
        "3",
    ]
    losses = {}
    for name, before in (("single", []), ("native", launch.command("native", 2))):
        file = tmp_path / f"{name}.npz"
        command = [*before, *program, str(file), "--backend", name, *options]
        code, printed = launch.run(command, launch.environment(forked=True), 100)
        assert code == 0, printed
        with np.load(file) as trace:
            losses[name] = trace["losses"]
            assert trace["sketches"].shape[0] == 3
    np.testing.assert_allclose(losses["native"], losses["single"], rtol=1e-12)
