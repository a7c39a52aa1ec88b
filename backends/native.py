"""The native core: shared memory on one host, MPI's messages between hosts.

Sums: ``collective/native``, our C++ core, from inside TensorFlow's graph
(``collective.tensorflow_ops``), so that a bucket is summed while the next gradients are
computed.

Sharp bits: between hosts the core needs an MPI library, and a launcher that starts MPI.
``transport_dtype`` rounds gradients to 16 bits, never counts or losses. Tensors on a GPU
are copied to the host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import collective
from collective import library, mpi_library, session, timeline
from collective.backends import world
from collective.backends.base import Availability, wait_until
from collective.backends.capabilities import (
    Collective,
    Elastic,
    OneDevice,
    Recording,
    ShardCollectives,
    SumsInBuckets,
    TensorParallel,
)
from collective.backends.options import Options
from collective.environment import Environment, HorovodGloo, slurm
from collective.errors import CollectiveError, UsageError
from collective.operations.call import Call
from collective.operations.kinds import (
    Kind,
    Max,
    Sum,
    algorithm_number,
    transport_number,
)
from collective.process_set import ProcessSet

if TYPE_CHECKING:
    import tensorflow as tf

ENDED = "ended the job with exit code"
ROUNDED_FROM = 1024  # elements


class NativeBackend(
    Elastic, SumsInBuckets, TensorParallel, OneDevice, ShardCollectives, Recording
):
    """A replica in each process, summed by the core in ``collective/native``."""

    name = "native"
    summary = "one replica a process, summed by our own core (shared memory, or MPI)"
    launcher = "collectiverun"
    takes = frozenset({"algorithm", "transport_dtype"})
    exchanges = True
    sends_as_made = True
    _group: ProcessSet | None = None  # the ranks of a backend that is ``among`` some

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        environment = self.environment
        if self.elastic and self.size != self.local_size:
            world.require_fault_tolerance()
        algorithm_number(options.algorithm)  # refused now, not in the first step
        transport_number(options.transport_dtype)
        collective.init(environment)
        if session.size() < environment.current.size:
            self._continue_without_missing(environment.size)
        self.rounds_to = None if self._alone else options.transport_dtype
        self._configure_devices(environment)
        from collective import tensorflow_ops

        self._ops = tensorflow_ops

    def _continue_without_missing(self, started: int) -> None:
        """Take a place among the ranks that joined, if others ended before that."""
        self._renumber(session.place())
        least = self.options.min_np or 1
        if self.size < least:
            raise CollectiveError(
                f"of {started} ranks {self.size} joined at the start, and min_np is "
                f"{least}",
                hint="see above why the others ended; or a smaller min_np",
            )

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Return whether the core was built and can reach all ranks."""
        if not library.path().exists():
            return Availability(False, "the native core was not built", library.HINT)
        if not environment.launched:
            return Availability(True, "one process")
        if environment.size != environment.local_size:
            return _between_hosts(environment)
        return Availability(True, f"{environment.size} processes on one host")

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], rounded: Sequence[int] = ()
    ) -> list[tf.Tensor]:
        """Return the sums, inside ``run``; some may travel in 16 bits."""
        dtype = self.options.transport_dtype
        # Losses, weights and counts stay exact: of 257 rows, bfloat16 would make 256.
        # And a few bytes are not worth the rounding.
        large = [
            index
            for index in rounded
            if (tensors[index].shape.num_elements() or 0) >= ROUNDED_FROM
        ]
        if dtype is None or self._alone or not large:
            return super().all_reduce(tensors)
        self.require_all_ranks()
        rest = sorted(set(range(len(tensors))) - set(large))
        results = list(tensors)
        for indices, transport in ((large, dtype), (rest, None)):
            sums = self._summed([tensors[i] for i in indices], transport)
            for index, total in zip(indices, sums, strict=True):
                results[index] = total
        return results

    def _all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tensors if self._alone else self._summed(tensors, None)

    @property
    def _alone(self) -> bool:
        """Return whether there is one replica, and never another."""
        return self.replicas == 1 and not self.elastic

    def _form_groups(self, groups: Sequence[Sequence[int]], number: int) -> None:
        """Make a process set of each group: all ranks make all of them."""
        if self.elastic:
            raise UsageError("groups of ranks with min_np", hint="drop min_np")
        sets = [ProcessSet(group) for group in groups]
        self._group = sets[number]

    def _summed(
        self, tensors: list[tf.Tensor], transport_dtype: str | None
    ) -> list[tf.Tensor]:
        return self._ops.all_reduce(
            tensors,
            Sum,
            process_set=self._group,
            algorithm=self.options.algorithm,
            transport_dtype=transport_dtype,
            bucket_bytes=self.bucket_bytes,
        )

    def _reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        return self._ops.reducescatter(rows, Sum, process_set=self._group)[0]

    def _all_gather(self, row: tf.Tensor) -> tf.Tensor:
        import tensorflow as tf

        rows = self._ops.allgather(row[None], process_set=self._group)
        return tf.ensure_shape(rows, [self.size, *row.shape])

    def _all_to_all(self, rows: tf.Tensor, counts: Sequence[int]) -> tf.Tensor:
        import tensorflow as tf

        replicas, count, length = rows.shape
        flat = tf.reshape(rows, [replicas * count, length])
        counts = [count] * replicas
        return self._ops.alltoall(flat, counts, process_set=self._group)[0]

    def _gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Gather the rows of all replicas."""
        return tensor if self._alone else self._ops.allgather(tensor, None, self._group)

    def _broadcast_bytes(self, data: np.ndarray, root: int) -> None:
        if self._group is not None:
            root = self._group.ranks[root]
        collective.broadcast(
            data, root, out=data, name="broadcast_array", process_set=self._group
        )

    def _barrier(self) -> None:
        """Wait for every process."""
        collective.barrier(process_set=self._group)

    def record(self, on: bool) -> None:
        """Start or stop recording the collectives that the core runs."""
        timeline.record_in_memory(on)

    def recorded(self) -> list[Collective]:
        """Return the collectives that the core has run since the last call."""
        return [Collective(*event) for event in timeline.take()]

    def lost(self, error: BaseException) -> bool:
        """Return whether the core found that a rank died or left."""
        import tensorflow as tf

        by_core = isinstance(error, library.PeerLost | tf.errors.AbortedError)
        return by_core and self.elastic and session.lost()

    def _regroup(self) -> list[int]:
        """Form the job again, with the ranks that are left or wait to join."""
        former = session.regroup(self.admits)
        self._renumber(session.place())
        return former

    def enter(self) -> list[int]:
        """Wait until the ranks of the running job admit this one."""
        former = session.enter()
        self.joins = False
        self._renumber(session.place())
        return former

    def leave(self) -> None:
        """Leave; no other rank waits for this one."""
        session.leave()

    def close(self) -> None:
        """Leave the job."""
        collective.shutdown()

    def abort(self, exit_code: int) -> None:
        """Fail the collectives of every rank, and end this one at once."""
        library.load().collective_abort(
            f"rank {self.rank} {ENDED} {exit_code}".encode()
        )
        super().abort(exit_code)

    def fails_alike(self, mark: int, seconds: float) -> bool:
        """Use an all-reduce matched by its name: others may be in other calls."""
        both, most = np.array([mark, -mark]), np.empty(2, np.int64)
        call = Call(
            Kind.ALL_REDUCE,
            [(both, most)],
            most,
            name="failures",
            op=int(Max),
            order=1,
        )
        self._failing = handle = call.start()  # it would wait if it were dropped
        if not wait_until(handle.done, seconds):
            return False
        handle.wait()
        return bool(most[0] == -most[1])

    def ended_by_another(self, error: BaseException) -> int | None:
        """Read the exit code from the error that ``abort`` causes everywhere."""
        found = re.search(rf"rank (\d+) {ENDED} (\d+)", str(error))
        if found is None or int(found[1]) == self.rank:
            return None
        return int(found[2])


def _between_hosts(environment: Environment) -> Availability:
    spread = f"{environment.size} processes, {environment.local_size} on this host"
    by_mpi = environment.launcher in ("mpirun", "horovodrun")
    by_mpi &= not HorovodGloo(os.environ).started_us()
    by_mpi |= environment.launcher in ("srun", "PMIx") and slurm.serves_mpi(os.environ)
    if by_mpi:
        try:
            mpi_library.load_mpi()
        except CollectiveError as error:
            return Availability(False, f"{spread}, and {error.message}", error.hint)
        return Availability(True, f"{spread}, joined by MPI")
    hint = "start it by mpirun, or put all processes on one host"
    if environment.launcher == "srun":
        hint = f"srun --mpi=pmix ... {mpi_library.SRUN_HINT}; or one node: srun -N 1"
    return Availability(
        False, f"{spread}, and {environment.launcher} starts no MPI", hint
    )
