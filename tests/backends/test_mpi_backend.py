"""The mpi backend together with the user's own MPI calls."""

from __future__ import annotations

import sys

import pytest

from tests import launch

BESIDE_THE_USER = """
import numpy as np
import tensorflow as tf
from mpi4py import MPI

from collective import backends
from collective.backends.mpi import MPIBackend

backend = backends.get("mpi")
user = MPI.COMM_WORLD
assert MPI.Comm.Compare(backend.world, user) == MPI.CONGRUENT

# On one communicator, this order would be an error: rank 0 starts the user's reduction
# before the backend's, rank 1 after it.
mine, total = np.full(4, 1.0 + user.rank), np.empty(4)
array = np.arange(5.0) * (user.rank + 1)
if user.rank == 0:
    request = user.Iallreduce(mine, total)
(summed,) = backend.all_reduce([tf.constant(array)])
if user.rank == 1:
    request = user.Iallreduce(mine, total)
request.Wait()
assert (total == 3).all() and (summed.numpy() == np.arange(5.0) * 3).all()

other = MPIBackend(backends.Options())
backend.close()
backend.close()
assert (other.broadcast_array(np.array([user.rank + 7])) == 7).all()
other.close()
user.Barrier()
print("done", flush=True)
"""


@pytest.mark.launches
def test_the_users_own_calls_are_on_another_communicator():
    pytest.importorskip("mpi4py")
    command = [*launch.command("mpi", 2), sys.executable, "-c", BESIDE_THE_USER]
    code, printed = launch.run(command, launch.environment(), 120)
    assert code == 0 and printed.count("done\n") == 2, printed
