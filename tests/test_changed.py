"""The tests that a change can reach."""

from __future__ import annotations

import pytest

from tests.changed import reaching


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("collective/hosts/__init__.py", "tests/collective/launching/test_slurm.py"),
        # Through a name that the package imports at its first use.
        ("collective/training/calls/fit.py", "tests/training/test_fit.py"),
        # Through files that the test starts: a file, a module, and files that it starts.
        ("tests/hosts/ranks_renewed.py", "tests/hosts/test_growing.py"),
        ("collective/launch/rank.py", "tests/collective/launching/test_reachable.py"),
        ("collective/native/job.cc", "tests/collective/test_allreduce.py"),
    ],
)
def test_a_change_reaches(file, test):
    assert test in reaching({file})


def test_a_change_does_not_reach_all():
    assert len(reaching({"collective/bench/measure.py"})) < 25
    assert not reaching({"docs/index.md"})
