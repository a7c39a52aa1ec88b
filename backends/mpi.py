"""MPI through mpi4py: one ``MPI_Allreduce`` on one flat buffer for each dtype.

Sums: the MPI that mpi4py was built for, on a duplicate of ``MPI_COMM_WORLD``, so that
these messages never meet messages of the user's own MPI calls. With ``bucket_bytes``
gradients travel in buckets, each as soon as back-propagation has made it.

Sharp bits: TensorFlow's tensors pass through NumPy, on the CPU. Calls block a thread of
TensorFlow. Elastic jobs (``min_np``) need Open MPI 5 with ``--with-ft ulfm``; there each
collective ends with an agreement of all ranks, and ranks may leave but none can join.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import deadline, recorder
from collective.backends import world
from collective.backends.base import Availability, wait_until
from collective.backends.capabilities import (
    Elastic,
    MatchedByOrder,
    OneDevice,
    ShardCollectives,
    SumsInBuckets,
    TensorParallel,
)
from collective.backends.options import Options
from collective.buckets import aligned_empty, in_buckets, reduce_arrays_flat
from collective.elastic import membership_file, wait_report
from collective.environment import Environment
from collective.environment.base import place_on
from collective.errors import CollectiveError, UsageError

if TYPE_CHECKING:
    import tensorflow as tf


class MPIBackend(
    Elastic,
    SumsInBuckets,
    TensorParallel,
    OneDevice,
    ShardCollectives,
    MatchedByOrder,
):
    """One replica in each MPI process."""

    name = "mpi"
    summary = "one replica a process, MPI_Allreduce on one flat buffer (mpi4py)"
    launcher = "mpirun"
    exchanges = True

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        self.world = world.start_mpi(self.environment, self.elastic)
        from mpi4py import MPI

        self._mpi = MPI
        self._lost = False
        # Carries, apart from all other messages, which ranks have failed.
        self._failures = None if self.elastic else self.world.Dup()
        if self.elastic:
            self._raise_errors()
        self._configure_devices(self.environment)
        deadline.watch(self.rank, self.abort)

    def _default_bucket_bytes(self) -> int | None:
        """Return None: MPI waits on a core that computes (measurements.md)."""
        return None

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Return whether it is usable: under mpirun, with mpi4py."""
        return world.mpi_availability(environment)

    def _form_groups(self, groups: Sequence[Sequence[int]], number: int) -> None:
        """Split the communicator by ``MPI_Comm_split``."""
        if self.elastic:
            raise UsageError("groups of ranks with min_np", hint="drop min_np")
        self.world = self.world.Split(number, self.rank)
        self._failures = None  # of all ranks: theirs to use, and to free

    def _all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        import tensorflow as tf

        if self.size == 1 and not self.elastic:
            return tensors
        each = None if tf.executing_eagerly() else self.bucket_bytes
        sums: list[Any] = [None] * len(tensors)
        before: list[Any] = []
        for places in in_buckets(tensors, each):
            # MPI matches collectives by their order, so a bucket waits for the previous
            # one.
            with tf.control_dependencies(before):
                bucket = self._sum_flat([tensors[place] for place in places])
            before = bucket[:1]
            for place, total in zip(places, bucket, strict=True):
                sums[place] = total
        return sums

    def _sum_flat(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        import tensorflow as tf

        sums = tf.numpy_function(
            lambda *arrays: reduce_arrays_flat(arrays, self._sum_in_place),
            tensors,
            [t.dtype for t in tensors],
            name="mpi_allreduce",
        )
        if tf.is_tensor(sums):  # eagerly, TensorFlow returns one without its list
            sums = [sums]
        for tensor, total in zip(tensors, sums, strict=True):
            total.set_shape(tensor.shape)
        return list(sums)

    def _sum_in_place(self, vector: np.ndarray) -> None:
        with (
            recorder.span(recorder.ALL_REDUCE, "by MPI", vector.nbytes),
            self._same_outcome(f"in MPI_Allreduce of {vector.nbytes:,} bytes"),
        ):
            self.world.Allreduce(self._mpi.IN_PLACE, vector, op=self._mpi.SUM)

    def _reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        def scatter(array: np.ndarray, out: np.ndarray) -> None:
            self.world.Reduce_scatter_block(array, out)

        return self._by_numpy(scatter, rows, rows.shape[1:], "MPI_Reduce_scatter_block")

    def _all_gather(self, row: tf.Tensor) -> tf.Tensor:
        def gather(array: np.ndarray, out: np.ndarray) -> None:
            self.world.Allgather(array, out)

        return self._by_numpy(gather, row, [self.size, *row.shape], "MPI_Allgather")

    def _all_to_all(self, rows: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        length = rows.shape[-1]
        received = [count * length for count in counts]
        sent = [rows.shape[1] * length] * self.size

        def exchange(array: np.ndarray, out: np.ndarray) -> None:
            self.world.Alltoallv([array, sent], [out, received])

        return self._by_numpy(exchange, rows, [sum(counts), length], "MPI_Alltoallv")

    def _gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Call ``MPI_Allgatherv``, after the ranks have exchanged the lengths."""
        import tensorflow as tf

        def gather(array: np.ndarray) -> np.ndarray:
            array = np.ascontiguousarray(array)
            sizes = np.empty(self.size, np.int64)
            with deadline.waiting("in MPI_Allgatherv"):
                self.world.Allgather(np.array([array.nbytes]), sizes)
                out = aligned_empty(int(sizes.sum()), np.dtype(np.uint8))
                self.world.Allgatherv(array.reshape(-1).view(np.uint8), [out, sizes])
            return out.view(array.dtype).reshape(-1, *array.shape[1:])

        out = tf.numpy_function(gather, [tensor], tensor.dtype, name="mpi_allgather")
        out.set_shape([None, *tensor.shape[1:]])
        return out

    def match(self, what: str) -> None:
        """Compare by an ``MPI_Allreduce`` of 16 bytes; send texts if they differ."""
        mark = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
        both = np.array([mark, -mark])
        with deadline.waiting(f"before {what}"):
            self.world.Allreduce(self._mpi.IN_PLACE, both, op=self._mpi.MAX)
        if both[0] == -both[1]:
            return
        calls = self.world.allgather(what)
        raise CollectiveError(
            f"rank {self.rank}: the ranks call different collectives: "
            + "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls)),
            hint="every rank must run the same steps and read the same metrics: leave "
            "out `if rank == 0:` around them",
            everywhere=False,
        )

    def _by_numpy(
        self,
        call: Callable[[np.ndarray, np.ndarray], None],
        tensor: tf.Tensor,
        shape: Sequence[int],
        name: str,
    ) -> Any:
        """Return the array that a collective of MPI writes, as a tensor."""
        import tensorflow as tf

        def called(array: np.ndarray) -> np.ndarray:
            out = aligned_empty(math.prod(shape), array.dtype)
            with self._same_outcome(f"in {name}"):
                call(array, out)
            return out.reshape(list(shape))

        out = tf.numpy_function(called, [tensor], tensor.dtype)
        out.set_shape(shape)
        return out

    def _broadcast_bytes(self, data: np.ndarray, root: int) -> None:
        """Call ``MPI_Bcast``."""
        with self._same_outcome("in MPI_Bcast"):
            self.world.Bcast(data, root=root)

    def _barrier(self) -> None:
        """Call ``MPI_Barrier``."""
        with self._same_outcome("in MPI_Barrier"):
            self.world.Barrier()

    def close(self) -> None:
        """Free the communicator; MPI itself ends with the process."""
        if self.elastic or self.world == self._mpi.COMM_NULL:
            return
        if self._failures is not None:
            self._failures.Free()
        self.world.Free()

    def abort(self, exit_code: int) -> None:
        """Call ``MPI_Abort``, which ends every rank."""
        self.world.Abort(exit_code)

    def fails_alike(self, mark: int, seconds: float) -> bool:
        """Use an ``MPI_Iallreduce`` on a communicator for this purpose alone."""
        if self._failures is None:
            return False
        both, most = np.array([mark, -mark]), np.empty(2, np.int64)
        request = self._failures.Iallreduce(both, most, op=self._mpi.MAX)
        self._failing = request, both, most  # MPI writes there until it has ended
        return wait_until(request.Test, seconds) and bool(most[0] == -most[1])

    @contextlib.contextmanager
    def _same_outcome(self, what: str) -> Iterator[None]:
        """Make a collective succeed or fail on all ranks alike, in an elastic job.

        When a rank dies, MPI may report success to some ranks, with a wrong sum (Open
        MPI 5.0.11 does, on several hosts).
        """
        if not self.elastic:
            with deadline.waiting(what):
                yield
            return
        mpi = self._mpi
        dead = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        failure: Any = None
        with wait_report.reported_wait(), deadline.waiting(what):
            try:
                yield
            except mpi.Exception as error:
                if error.Get_error_class() not in dead:
                    raise
                failure = error
                self.world.Revoke()  # otherwise some ranks wait for this one
            try:
                succeeded = self.world.Agree(int(failure is None))
            except mpi.Exception as error:
                succeeded, failure = 0, failure or error
        if not succeeded:
            self._lost = True
            raise failure or mpi.Exception(mpi.ERR_REVOKED)

    def _raise_errors(self) -> None:
        """Make MPI raise errors instead of ending the process (ULFM)."""
        world.require_fault_tolerance()
        atexit.register(self._mpi.Finalize)
        self._hosts = self.world.allgather(self._mpi.Get_processor_name())
        self.world.Set_errhandler(self._mpi.ERRORS_RETURN)

    def lost(self, error: BaseException) -> bool:
        """Return whether MPI has reported a dead rank."""
        return self._lost

    def _regroup(self) -> list[int]:
        """Call ``MPI_Comm_split`` if all ranks live, else ``MPI_Comm_shrink``."""
        # Open MPI's Finalize never returns if all ranks of a host are dead.
        atexit.unregister(self._mpi.Finalize)
        before = self.world
        with wait_report.reported_wait():
            split = self._split(stays=True)
            if split is None:
                before.Revoke()  # so that every rank gets an error
            self.world = split or before.Shrink()
        self.world.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._lost = False
        group, wider = self.world.Get_group(), before.Get_group()
        former = group.Translate_ranks(range(self.world.size), wider)
        self._hosts = [self._hosts[rank] for rank in former]
        place = place_on("mpirun", self.world.rank, self._hosts)
        self._renumber(place)
        deadline.watch(self.rank, self.abort)
        recorder.renumber(place)
        return list(former)

    def leave(self) -> None:
        """Leave; the other ranks call ``regroup`` and do not wait for this one."""
        membership_file.write_state(membership_file.LEFT)
        self._split(stays=False)
        atexit.unregister(self._mpi.Finalize)

    def _split(self, stays: bool) -> Any:
        """Return a communicator of the ranks that stay; None if one died in between."""
        if not self._agree(not self._lost):
            return None
        try:
            color = 0 if stays else self._mpi.UNDEFINED
            left = self.world.Split(color, self.world.rank)
        except self._mpi.Exception:
            left = None
        return left if self._agree(left is not None) else None

    def _agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes, and none has died: the same on all."""
        try:
            return bool(self.world.Agree(int(yes)))
        except self._mpi.Exception:
            return False
