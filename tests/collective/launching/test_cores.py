"""The cores of each rank of a host, on invented machines."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from collective.launch import cores


def machine(folder: Path, packages: int, cores_each: int, threads: int) -> int:
    """Describe a machine as Linux does; return its number of logical cores.

    Linux counts the first thread of every core, then the second of every core.
    """
    number = 0
    for _, package, core in itertools.product(
        range(threads), range(packages), range(cores_each)
    ):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
        number += 1
    return number


def test_four_cores(tmp_path):
    logical = range(machine(tmp_path, 1, 4, 1))
    assert cores.share(1, logical, tmp_path) == [[]]
    assert cores.share(2, logical, tmp_path) == [[0, 1], [2, 3]]
    assert cores.share(3, logical, tmp_path) == [[0], [1], [2, 3]]
    assert cores.share(4, logical, tmp_path) == [[0], [1], [2], [3]]
    # With fewer cores than ranks, the kernel places them better.
    assert cores.share(64, logical, tmp_path) == [[]] * 64


def test_four_cores_of_two_threads(tmp_path):
    logical = range(machine(tmp_path, 1, 4, 2))  # core 0 has threads 0 and 4
    assert cores.share(2, logical, tmp_path) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    # Two ranks never get the two threads of a core.
    assert cores.share(3, logical, tmp_path) == [[0, 4], [1, 5], [2, 6, 3, 7]]
    assert cores.share(4, logical, tmp_path) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    # There are more ranks than cores, and at least a thread for each.
    assert cores.share(5, logical, tmp_path) == [[0], [4, 1], [5], [2, 6], [3, 7]]
    assert cores.share(9, logical, tmp_path) == [[]] * 9


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4, 7, 8, 16])
def test_sixty_four_cores_in_two_packages(tmp_path, ranks, threads):
    logical = range(machine(tmp_path, 2, 32 // threads, threads))
    shares = cores.share(ranks, logical, tmp_path)
    assert sorted(itertools.chain(*shares)) == list(logical)
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 64 // ranks // threads * threads
    assert max(sizes) - min(sizes) <= threads
    if ranks % 2 == 0:  # then no rank spans packages
        for share in shares:
            first = {thread % 64 % (64 // threads) < 32 // threads for thread in share}
            assert len(first) == 1, share


def test_some_cores_of_a_machine(tmp_path):
    """In a container, or under taskset, only cores of this process are used."""
    machine(tmp_path, 1, 4, 2)
    assert cores.share(2, [1, 2, 5, 6], tmp_path) == [[1, 5], [2, 6]]


def test_a_machine_that_does_not_describe_itself(tmp_path):
    assert cores.share(2, range(8), tmp_path) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cores.share(3, range(8), tmp_path) == [[0, 1], [2, 3, 4], [5, 6, 7]]


def test_four_threads_of_one_core(tmp_path):
    """With more ranks than physical cores, threads are divided among the ranks."""
    logical = range(machine(tmp_path, 1, 1, 4))
    assert cores.share(2, logical, tmp_path) == [[0, 1], [2, 3]]


def test_short_form():
    assert cores.describe([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
