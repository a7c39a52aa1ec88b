"""MPI through mpi4py: one ``MPI_Allreduce`` on one fused buffer."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from collective import recorder
from collective.backends import mpi_world
from collective.backends.base import Availability, Backend, Options
from collective.backends.devices import configure, stages
from collective.elastic import membership_file
from collective.environment import Environment, detect
from collective.environment.base import place_on

# TensorFlow takes a NumPy array over without a copy when it is aligned like this.
ALIGNMENT = 64


class MPIBackend(Backend):
    """A replica in each MPI process, summed by whatever MPI mpi4py was built for."""

    name = "mpi"
    launcher = "mpirun"
    summary = "one replica a process, MPI_Allreduce on one fused buffer (mpi4py)"
    own_options = ("min_np", "max_np", "model_parallel")

    def __init__(self, options: Options, environment: Environment | None = None):
        environment = environment or detect()
        super().__init__(options, environment)
        outlives = options.min_np is not None
        self.world = mpi_world.start(environment, outlives)
        self._lost = False
        if outlives:
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
                self._together(),
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
        with self._together():
            self.world.Bcast(array.reshape(-1).view(np.uint8), root=root)
        return array

    def _barrier(self) -> None:
        """``MPI_Barrier``."""
        with self._together():
            self.world.Barrier()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks call ends well for all of them, or for none.

        When a rank dies, MPI may tell some of the others that all went well, and give
        them a wrong sum (Open MPI 5.0.11 does, on several hosts).
        """
        from mpi4py import MPI

        if self.options.min_np is None:
            yield
            return
        dead = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        failure: Any = None
        try:
            yield
        except MPI.Exception as error:
            if error.Get_error_class() not in dead:
                raise
            failure = error
            self.world.Revoke()  # else others wait for this rank
        try:
            well = self.world.Agree(int(failure is None))
        except MPI.Exception as error:
            well, failure = 0, failure or error
        if not well:
            self._lost = True
            raise failure or MPI.Exception(MPI.ERR_REVOKED)

    def _raise_errors(self) -> None:
        """For ``mpirun --with-ft ulfm``: MPI's errors are told, and end nothing."""
        from mpi4py import MPI

        mpi_world.require_fault_tolerance()
        atexit.register(MPI.Finalize)
        self._hosts = self.world.allgather(MPI.Get_processor_name())

        self.world = self.world.Dup()
        self.world.Set_errhandler(MPI.ERRORS_RETURN)

    def lost(self, error: BaseException) -> bool:
        """Where MPI has said so."""
        return self._lost

    def regroup(self) -> list[int]:
        """``MPI_Comm_split`` where all live, else ``MPI_Comm_shrink``."""
        from mpi4py import MPI

        # Open MPI's waits for ever where all ranks of a host are dead.
        atexit.unregister(MPI.Finalize)
        before, parted = self.world, self._part(stays=True)
        if parted is None:
            before.Revoke()  # so that all notice
        self.world = parted or before.Shrink()
        self.world.Set_errhandler(MPI.ERRORS_RETURN)
        self._lost = False
        group, wider = self.world.Get_group(), before.Get_group()
        former = group.Translate_ranks(range(self.world.size), wider)
        self._hosts = [self._hosts[rank] for rank in former]
        place = place_on("mpirun", self.world.rank, self._hosts)
        self._renumber(place)
        recorder.renumber(place)
        return list(former)

    def leave(self) -> None:
        """The others ``regroup``, and do not wait for this process to end."""
        from mpi4py import MPI

        membership_file.write(membership_file.LEFT)
        self._part(stays=False)
        atexit.unregister(MPI.Finalize)

    def _part(self, stays: bool) -> Any:
        """A communicator of those that stay, where all call this; None if one died."""
        from mpi4py import MPI

        if not self._agree(not self._lost):
            return None
        try:
            color = 0 if stays else MPI.UNDEFINED
            left = self.world.Split(color, self.world.rank)
        except MPI.Exception:
            left = None
        return left if self._agree(left is not None) else None

    def _agree(self, yes: bool) -> bool:
        """Whether all ranks say yes, and none has died: the same on all of them."""
        from mpi4py import MPI

        try:
            return bool(self.world.Agree(int(yes)))
        except MPI.Exception:
            return False

    def abort(self, exit_code: int) -> None:
        """``MPI_Abort``: ends every rank."""
        self.world.Abort(exit_code)


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised vector whose memory begins at a multiple of ``ALIGNMENT``."""
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size * dtype.itemsize].view(dtype)
