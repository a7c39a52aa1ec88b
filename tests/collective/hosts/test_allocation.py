"""The hosts that a batch system has allocated."""

from __future__ import annotations

import pytest

from collective.errors import UsageError
from collective.hosts import Host, find_allocation


@pytest.mark.parametrize(
    "variable, text, system, wanted",
    [
        ("LSB_DJOB_HOSTFILE", "b1\nb1\nb2\n", "LSF", {"b1": 2, "b2": 1}),
        ("PBS_NODEFILE", "n1\nn2\nn1\n\n", "PBS", {"n1": 2, "n2": 1}),
        (
            "PE_HOSTFILE",
            "n1.x 4 all.q@n1 UNDEFINED\nn2.x 2 all.q@n2 <NULL>\nn1.x 1 b.q@n1 UNDEFINED\n",
            "Grid Engine",
            {"n1.x": 5, "n2.x": 2},
        ),
    ],
)
def test_the_file_of_a_batch_system(variable, text, system, wanted, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    found = find_allocation({variable: str(file)})
    assert found is not None and found.system == system
    assert list(found.hosts) == [Host(name, slots) for name, slots in wanted.items()]


def test_slurm_comes_first_and_there_may_be_none(tmp_path):
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}
    found = find_allocation(slurm | {"PBS_NODEFILE": "/none"})
    assert found is not None and found.system == "Slurm"
    assert list(found.hosts) == [Host("n1", 2), Host("n2", 1)]
    assert find_allocation({}) is None


@pytest.mark.parametrize(
    "variable, text, message",
    [
        ("PBS_NODEFILE", "", "no hosts in it"),
        ("PE_HOSTFILE", "n1 four q U\n", "'four' after n1 is not a number"),
        ("PE_HOSTFILE", "n1\n", "PE_HOSTFILE"),
        ("LSB_DJOB_HOSTFILE", "a b c\n", "not the name"),
        ("PBS_NODEFILE", None, "cannot read the hosts of the job"),
    ],
)
def test_a_file_that_makes_no_sense(variable, text, message, tmp_path):
    file = tmp_path / "hosts"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        find_allocation({variable: str(file)})
    assert str(file) in str(caught.value) and caught.value.hint
