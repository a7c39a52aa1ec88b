"""MPI through mpi4py: one ``MPI_Allreduce`` on one fused buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from backends import mpi_world
from backends.base import Availability, Backend, Options
from backends.devices import configure, stages
from collective import recorder
from collective.environment import Environment, detect

# TensorFlow takes a NumPy array over without a copy when it is aligned like this.
ALIGNMENT = 64


class MPIBackend(Backend):
    """A replica in each MPI process, summed by whatever MPI mpi4py was built for."""

    name = "mpi"
    launcher = "mpirun"
    summary = "one replica a process, MPI_Allreduce on one fused buffer (mpi4py)"
    own_options = ("min_np", "model_parallel")

    def __init__(self, options: Options, environment: Environment | None = None):
        environment = environment or detect()
        super().__init__(options, environment)
        self.world = mpi_world.start(environment)
        self._lost = False
        if options.min_np is not None:
            self._raise_errors()
        configure(options, environment)
        self.stages = stages(options)

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable under mpirun, with mpi4py."""
        return mpi_world.availability(environment)

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        import tensorflow as tf

        if self.size == 1 and self.options.min_np is None:
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
            with (
                recorder.span(recorder.ALL_REDUCE, "by MPI", buffer.nbytes),
                self._noticing(),
            ):
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

    def _broadcast_array(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """The root's array, by ``MPI_Bcast``."""
        array = np.array(array, order="C")
        with self._noticing():
            self.world.Bcast(array.reshape(-1).view(np.uint8), root=root)
        return array

    def _barrier(self) -> None:
        """``MPI_Barrier``."""
        with self._noticing():
            self.world.Barrier()

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Notes where MPI says that a rank has died."""
        from mpi4py import MPI

        try:
            yield
        except MPI.Exception as error:
            dead = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
            self._lost |= error.Get_error_class() in dead
            raise

    def _raise_errors(self) -> None:
        """For ``mpirun --with-ft ulfm``: MPI's errors are told, and end nothing."""
        from mpi4py import MPI

        self.world = self.world.Dup()
        self.world.Set_errhandler(MPI.ERRORS_RETURN)

    def lost(self, error: BaseException) -> bool:
        """Where MPI has said so."""
        return self._lost

    def regroup(self) -> list[int]:
        """``MPI_Comm_revoke``, so that all notice, and ``MPI_Comm_shrink``."""
        from mpi4py import MPI

        self.world.Revoke()
        before, self.world = self.world, self.world.Shrink()
        self.world.Set_errhandler(MPI.ERRORS_RETURN)
        self._lost = False
        group, wider = self.world.Get_group(), before.Get_group()
        former = group.Translate_ranks(range(self.world.size), wider)
        self._renumber(self.world.rank, self.world.size)
        return list(former)

    def abort(self, exit_code: int) -> None:
        """``MPI_Abort``: ends every rank."""
        self.world.Abort(exit_code)


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised vector whose memory begins at a multiple of ``ALIGNMENT``."""
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size * dtype.itemsize].view(dtype)
