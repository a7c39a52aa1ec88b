"""The cluster of parameter servers, made from the ranks of a launch."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from collective.backends import Options
from collective.backends.tf_parameter_server import ParameterServerBackend
from collective.environment import Environment
from collective.errors import UsageError
from tests import launch

RANKS = launch.ROOT / "tests" / "backends" / "ranks_served.py"


def run(*arguments: str) -> tuple[int | None, str]:
    before = launch.command("mpi", 4)
    return launch.run(
        [*before, sys.executable, str(RANKS), *arguments], launch.environment(), 240
    )


@pytest.mark.parametrize("size, servers", [(4, 3), (3, 4), (2, None)])
def test_servers_without_workers_are_refused(size, servers):
    place = Environment("mpirun", 0, size, 0, size)
    with pytest.raises(UsageError, match="and no worker") as caught:
        ParameterServerBackend(Options(parameter_servers=servers), place)
    assert caught.value.exit_code == 2
    assert f"mpirun -np {(servers or 1) + 2} " in caught.value.hint


@pytest.mark.matrix
@pytest.mark.launches
def test_counts_goes_on_without_a_worker_and_ends_without_a_server():
    pytest.importorskip("mpi4py")
    code, printed = run()
    assert code == 1, printed
    message = "rank 1: worker 0 was killed by signal 9; it is started again"
    assert printed.count(message) == 1, printed
    assert "went on without worker 0" in printed
    assert "worker 0 is back at work" in printed
    message = "rank 3: error: parameter server 0 was killed by signal 9"
    assert printed.count(message) == printed.count("HINT: ") == 1, printed
    assert "went on without a server" not in printed and "Traceback" not in printed


@pytest.mark.launches
@pytest.mark.matrix
def test_one_worker_trains_what_one_process_trains(tmp_path, clean_keras):
    """Variables are cut in two, clipped, accumulated, in batches that do not divide."""
    pytest.importorskip("mpi4py")
    from collective import backends
    from tests.backends.ranks_served import CASES, results

    code, printed = run(str(tmp_path))
    assert code == 0, printed
    alone = backends.get("single")
    for case in CASES:
        wanted = results(alone, case)
        with np.load(tmp_path / f"{case}.npz") as got:
            assert len(got.files) == len(wanted)
            for name, value in zip(got.files, wanted, strict=True):
                np.testing.assert_allclose(
                    got[name], value, rtol=0, atol=1e-12 * np.abs(value).max()
                )
