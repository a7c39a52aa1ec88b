"""Jobs of 1 rank, of 5, and (make test-equivalence) of 8: their properties without TensorFlow.

Jobs of 2 to 4 ranks run everything (``test_launch.py``).
"""

import os
import sys
from pathlib import Path

import pytest

from tests.launch import STARTS_RANKS, capture

ROOT = Path(__file__).parents[2]
pytestmark = STARTS_RANKS
FILES = ("allreduce", "data_movement", "process_sets", "agreement", "order")
# Tests with random values, every root and every set, and mismatches; not those with many
# megabytes or many threads, which take long on few cores.
PROPERTIES = (
    "any or mixture or alike or gather or broadcast or scatter or toall or set "
    "or roots or names"
)


# 8 ranks take as long as all others together, and show the same as 5.
@pytest.mark.parametrize("size", [1, 5, pytest.param(8, marks=pytest.mark.matrix)])
def test_the_properties(size):
    result = capture(
        [
            *[sys.executable, "-m", "collective.launch", "-np", str(size)],
            *[sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"],
            *["--color=no", "-k", f"({PROPERTIES}) and not megabytes and not threads"],
            *(str(Path(__file__).with_name(f"test_{name}.py")) for name in FILES),
        ],
        170,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLLECTIVE_TEST_EXAMPLES": "15",
        },
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert result.stdout.count(" passed") == size
