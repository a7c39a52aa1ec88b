"""Our core serves tf-multiworker's calls of MPI, without MPI and TensorFlow."""

from __future__ import annotations

import sys

import pytest

from collective.backends import world
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.environment import Environment
from tests import launch

pytestmark = [pytest.mark.launches, launch.NEEDS_CORE]
ASKS = """
import sys
import numpy as np
from collective.backends.world import CoreWorld
from collective.environment import detect

place = detect()
world = CoreWorld(place)
values = world.allgather(("x" * place.rank, place.rank))
assert values == [("", 0), ("x", 1), ("xx", 2)], values
mine = np.arange(6, dtype=np.uint8) * (place.rank + 1)
world.Bcast(mine, root=2)
assert mine.tolist() == [0, 3, 6, 9, 12, 15], mine
world.Barrier()
print("answered", flush=True)
world.Barrier()
if place.rank == 1:
    world.Abort(7)
import time; time.sleep(60)
"""


def test_it_answers_as_mpi_would():
    words = ["-m", "collective.launch", "-np", "3", sys.executable, "-c", ASKS]
    code, printed = launch.run([sys.executable, *words], launch.environment(), 60)
    assert code == 7, printed
    assert printed.count("answered") == 3


@pytest.mark.parametrize("name", ["collectiverun", "torchrun", "TF_CONFIG"])
def test_tf_multiworker_needs_no_mpi_on_one_host(name):
    here, apart = Environment(name, 1, 4, 1, 4), Environment(name, 1, 4, 1, 2)
    assert MultiWorkerBackend.availability(here).usable
    assert not world.mpi_availability(here).usable
    found = MultiWorkerBackend.availability(apart)
    by_mpi = "collectiverun --mpi" if name == "collectiverun" else "mpirun -np 4"
    assert not found.usable and found.hint.startswith(by_mpi)
    assert world.can_serve(here) and not world.can_serve(apart)
