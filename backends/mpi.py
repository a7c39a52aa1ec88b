"""MPI through mpi4py: one ``MPI_Allreduce`` on one fused buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from backends import mpi_world
from backends.base import Availability, Backend, Options
from backends.devices import configure
from collective import recorder
from collective.environment import Environment, detect

# TensorFlow takes a NumPy array over without a copy when it is aligned like this.
ALIGNMENT = 64


class MPIBackend(Backend):
    """A replica in each MPI process, summed by whatever MPI mpi4py was built for."""

    name = "mpi"
    launcher = "mpirun"
    summary = "one replica a process, MPI_Allreduce on one fused buffer (mpi4py)"

    def __init__(self, options: Options, environment: Environment | None = None):
        environment = environment or detect()
        super().__init__(options, environment)
        self.world = mpi_world.start(environment)
        configure(options, environment)

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable under mpirun, with mpi4py."""
        return mpi_world.availability(environment)

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        import tensorflow as tf

        if self.size == 1:
            return tensors
        sums = tf.numpy_function(
            self._sum_arrays, tensors, [t.dtype for t in tensors], name="mpi_allreduce"
        )
        for tensor, total in zip(tensors, sums, strict=True):
            total.set_shape(tensor.shape)
        return list(sums)

    def _sum_arrays(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Copies the arrays into one buffer for each dtype, sums, returns views."""
        from mpi4py import MPI

        out: list[Any] = [None] * len(arrays)
        for dtype in dict.fromkeys(a.dtype for a in arrays):
            places = [i for i, a in enumerate(arrays) if a.dtype == dtype]
            step = ALIGNMENT // dtype.itemsize
            starts = np.cumsum(
                [0, *(-(-arrays[i].size // step) * step for i in places)]
            )
            buffer = aligned_empty(int(starts[-1]), dtype)
            for i, start in zip(places, starts, strict=False):
                view = buffer[start : start + arrays[i].size]
                view[:] = arrays[i].reshape(-1)
                out[i] = view.reshape(arrays[i].shape)
            with recorder.span(recorder.ALL_REDUCE, "by MPI", buffer.nbytes):
                self.world.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)
        return out

    def _reduce_scatter(self, rows: Any) -> Any:
        def scattered(array: np.ndarray) -> np.ndarray:
            out = aligned_empty(array.shape[1], array.dtype)
            self.world.Reduce_scatter_block(array, out)
            return out

        return self._by_numpy(scattered, rows, rows.shape[1:])

    def _all_gather(self, row: Any) -> Any:
        def gathered(array: np.ndarray) -> np.ndarray:
            out = aligned_empty(self.size * array.size, array.dtype)
            self.world.Allgather(array, out)
            return out.reshape(self.size, -1)

        return self._by_numpy(gathered, row, [self.size, *row.shape])

    def _by_numpy(self, call: Callable[..., Any], tensor: Any, shape: Any) -> Any:
        import tensorflow as tf

        out = tf.numpy_function(call, [tensor], tensor.dtype)
        out.set_shape(shape)
        return out

    def _broadcast_array(self, array: np.ndarray) -> np.ndarray:
        """Rank 0's array, by ``MPI_Bcast``."""
        array = np.array(array, order="C")
        self.world.Bcast(array.reshape(-1).view(np.uint8), root=0)
        return array

    def _barrier(self) -> None:
        """``MPI_Barrier``."""
        self.world.Barrier()

    def abort(self, exit_code: int) -> None:
        """``MPI_Abort``: ends every rank."""
        self.world.Abort(exit_code)


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised vector whose memory begins at a multiple of ``ALIGNMENT``."""
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size * dtype.itemsize].view(dtype)
