"""Counts each rank's messages; docs/explanation/algorithms.md derives the numbers.

The real algorithms run, with all ranks in one process and a network that counts.
"""

import math
import subprocess

import pytest

from collective.library import NATIVE

BUILD = NATIVE.parent.parent / "build/native"
pytestmark = [
    pytest.mark.skipif(
        not (BUILD / "build.ninja").exists(), reason="the core was not built here"
    ),
]
KB, MB = 1 << 10, 1 << 20
CHUNK, MOST, PART, PIECE = 512 * KB, 8 * MB, 32 * KB, 60 * KB
ALIGN = 256  # parts begin on whole cache lines of slots


@pytest.fixture(scope="module")
def count():
    built = ["cmake", "--build", str(BUILD), "--target", "count_messages"]
    subprocess.run(built, check=True, capture_output=True)

    def run(hosts, slots, size, algorithm):
        command = [str(BUILD / "count_messages"), *map(str, (hosts, slots, size))]
        done = subprocess.run(
            [*command, algorithm],
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        )
        *numbers, right = done.stdout.split()
        assert right == "right"
        return [int(number) for number in numbers]

    return run


def log2(n):
    return math.ceil(math.log2(n))


@pytest.mark.parametrize(
    ("hosts", "slots"), [(2, 1), (3, 1), (2, 4), (5, 3), (16, 2), (64, 1)]
)
@pytest.mark.parametrize("size", [512 * KB, 8 * MB])
def test_direct_and_hierarchical(hosts, slots, size, count):
    messages, sent, compared, announced = count(hosts, slots, size, "auto")
    n = hosts * slots
    chunk = min(max(n * PART, CHUNK), MOST)
    pieces = math.ceil((min(chunk, size) / n + ALIGN) / PIECE)
    assert messages <= 2 * (hosts - 1) * math.ceil(size / chunk) * pieces + compared
    assert sent <= 2 * (hosts - 1) / hosts * size / slots * 1.02 + 16 * KB
    assert compared == log2(n) and announced <= log2(n)


@pytest.mark.parametrize(("hosts", "slots"), [(4, 1), (64, 1), (8, 4)])
def test_halving_doubling_of_few_bytes(hosts, slots, count):
    n = hosts * slots
    messages, sent, compared, _ = count(hosts, slots, 16 * KB, "auto")
    assert messages <= 2 * log2(n) + compared
    assert sent <= 2 * (n - 1) / n * 16 * KB + 16 * KB


@pytest.mark.matrix
@pytest.mark.parametrize("hosts", [256, 1024, 4096])
def test_on_thousands_of_hosts(hosts, count):
    messages, _, compared, announced = count(hosts, 1, 64 * KB, "auto")
    assert messages <= 3 * log2(hosts) and compared == log2(hosts)
    assert announced <= log2(hosts)
