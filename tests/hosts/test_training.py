"""The trained model on several hosts equals one process."""

from __future__ import annotations

from functools import partial

import pytest

from tests import launch
from tests.training.cases import CASES

HERE = "tests/training/test_equivalence.py"
# Batch statistics are not compared in float32: there the order of the hosts in a sum
# changes the last bits, and 30 steps amplify this beyond the limit.
CHOSEN = {
    "accumulate-empty-replica": ("float64", "float32"),
    "loss-scaling": ("float64", "float32"),
    "batchnorm-accumulate": ("float64",),
}
OTHERS = ("test_sums_what_ranks_hold", "test_every_rank_gets_the_values_of_rank_zero")
TESTS = [f"{name}-{precision}" for name in CHOSEN for precision in CHOSEN[name]]
TWO, FOUR = (2, 2), (1, 1, 1, 1)  # number of ranks on each host


def on(backend: str, *slots: int):
    """Return a parameter set; only for make test-all if native shows the same."""
    marks = [pytest.mark.horovod] if backend == "horovod" else []
    marks += [pytest.mark.matrix] if slots == FOUR and backend != "native" else []
    hosts = "four" if slots == FOUR else "two"
    return pytest.param(backend, slots, id=f"{backend}-{hosts}", marks=marks)


@pytest.mark.parametrize(
    "backend, slots",
    [on(backend, *slots) for slots in (TWO, FOUR) for backend in launch.LAUNCHERS],
)
def test_on_hosts(backend, slots, hosts, reference):
    run_on(hosts, slots, backend, reference)


def run_on(lab, slots, backend, reference):
    ranks = sum(slots)
    for case in CASES:
        for precision in CHOSEN.get(case.name, ()):
            reference(case, precision, ranks)
    ended = launch.launch(
        backend,
        ranks,
        [HERE, "-k", " or ".join([*TESTS, *OTHERS])],
        reference.folder,
        seconds=240,
        start=partial(lab.mpirun, slots),
    )
    assert ended.passed() == len(TESTS) + len(OTHERS)
