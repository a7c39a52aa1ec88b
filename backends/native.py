"""The native core: shared memory on one host, MPI's messages between hosts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective import library, session, timeline
from collective.backends import mpi_world
from collective.backends.base import Availability, Backend, Collective, Options
from collective.backends.tensor_group import TensorGroup
from collective.environment import Environment, detect
from collective.errors import CollectiveError, UsageError
from collective.operations.kinds import algorithm_number, transport_number

ENDED = "ended the job with exit code"
NARROWED_FROM = 1024  # elements


class NativeBackend(Backend):
    """A replica in each process, summed by the core in ``collective/native``."""

    name = "native"
    launcher = "collectiverun"
    summary = "one replica a process, summed by our own core (shared memory, or MPI)"
    own_options = (
        "algorithm",
        "transport_dtype",
        "bucket_bytes",
        "min_np",
        "max_np",
        "tensor_parallel",
        "model_parallel",
    )

    def __init__(self, options: Options, environment: Environment | None = None):
        import collective
        from collective.backends.devices import configure, stages

        environment = environment or detect()
        super().__init__(options, environment)
        if options.min_np is not None and self.size != self.local_size:
            mpi_world.require_fault_tolerance()
        algorithm_number(options.algorithm)  # told now, not in the first step
        transport_number(options.transport_dtype)
        collective.init(environment)
        if session.size() < environment.current.size:
            self._leave_out(environment.size)
        if options.tensor_parallel > 1:
            self._share_replicas(options.tensor_parallel)
        configure(options, environment, self.overlaps)
        self.stages = stages(options)
        self._recording: timeline.Recording | None = None

    def _leave_out(self, started: int) -> None:
        """Takes its place among those ranks that came."""
        self._renumber(session.place())
        least = self.options.min_np or 1
        if self.size < least:
            raise CollectiveError(
                f"of {started} ranks {self.size} came to the start, and --min-np is "
                f"{least}",
                hint="see above why the others ended; or a smaller --min-np",
            )

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable where the core was built; between hosts, where its MPI plug-in was."""
        if not library.path().exists():
            return Availability(
                False,
                "the native core was not built",
                "install a C++17 compiler (g++ or clang++), then: pip install -e .",
            )
        if not environment.launched:
            return Availability(True, "one process")
        if environment.size != environment.local_size:
            return _across_hosts(environment)
        return Availability(True, f"{environment.size} processes on one host")

    def _share_replicas(self, parts: int) -> None:
        """Makes groups of ranks that hold a replica together."""
        if self.options.min_np is not None or self.options.max_np is not None:
            raise UsageError(
                "with a rank that dies, its part of the layers is lost",
                hint="drop --min-np and go on from a --checkpoint-dir, or drop "
                "--tensor-parallel",
            )
        self.tensor = TensorGroup(self, parts)
        self.replicas = self.size // parts
        self.local_replicas = range(self.rank // parts, self.rank // parts + 1)

    def sum_over_processes(self, tensors: Sequence[Any]) -> list[Any]:
        """Over all ranks, whatever they hold."""
        from collective import tensorflow_ops

        self.require_all_ranks()
        return tensorflow_ops.all_reduce(tensors)

    def all_reduce(
        self, tensors: Sequence[Any], rounded: Sequence[int] = ()
    ) -> list[Any]:
        """Inside ``run``: the sums; some may travel in 16 bits."""
        narrow = self.options.transport_dtype
        # Losses, weights and counts stay as they are: of 257 rows, bfloat16 would
        # make 256; and few bytes are not worth the rounding.
        large = [
            place
            for place in rounded
            if (tensors[place].shape.num_elements() or 0) >= NARROWED_FROM
        ]
        if narrow is None or self._alone or not large:
            return super().all_reduce(tensors)
        self.require_all_ranks()
        rest = sorted(set(range(len(tensors))) - set(large))
        results = list(tensors)
        for places, dtype in ((large, narrow), (rest, None)):
            sums = self._reduced([tensors[i] for i in places], dtype)
            for place, total in zip(places, sums, strict=True):
                results[place] = total
        return results

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        return tensors if self._alone else self._reduced(tensors, None)

    @property
    def _alone(self) -> bool:
        """Whether there is one replica, and never another."""
        return self.replicas == 1 and self.options.min_np is None

    def _reduced(self, tensors: list[Any], transport_dtype: str | None) -> list[Any]:
        from collective import tensorflow_ops

        return tensorflow_ops.all_reduce(
            tensors,
            process_set=None if self.tensor is None else self.tensor.across,
            algorithm=self.options.algorithm,
            transport_dtype=transport_dtype,
            bucket_bytes=self._bucket_bytes,
        )

    def _reduce_scatter(self, rows: Any) -> Any:
        from collective import tensorflow_ops

        return tensorflow_ops.reducescatter(rows)[0]

    def _all_gather(self, row: Any) -> Any:
        import tensorflow as tf

        from collective import tensorflow_ops

        rows = tensorflow_ops.allgather(row[None])
        return tf.ensure_shape(rows, [self.size, *row.shape])

    def _broadcast_array(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """The root's array, through shared memory."""
        import collective

        array = np.array(array, order="C")
        if array.size:
            whole = array.reshape(-1).view(np.uint8)
            collective.broadcast(whole, root, out=whole, name="broadcast_array")
        return array

    def _barrier(self) -> None:
        """Waits for every process."""
        import collective

        collective.barrier()

    def record(self, on: bool) -> None:
        """Begins or ends to record what the core runs."""
        if self._recording is not None:
            self._recording.close()
        self._recording = timeline.Recording() if on else None

    def recorded(self) -> list[Collective]:
        """What the core has run since the last call."""
        events = [] if self._recording is None else self._recording.take()
        return [
            Collective(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"]["bytes"])
            for e in events
        ]

    def lost(self, error: BaseException) -> bool:
        """Where the core found a rank dead, or gone."""
        import tensorflow as tf

        told = isinstance(error, library.PeerLost | tf.errors.AbortedError)
        return told and self.options.min_np is not None and session.lost()

    def regroup(self) -> list[int]:
        """Meets the other ranks anew."""
        former = session.regroup()
        self._renumber(session.place())
        return former

    def enter(self) -> list[int]:
        """Waits until the ranks of the job meet anew."""
        former = session.enter()
        self.joins = False
        self._renumber(session.place())
        return former

    def leave(self) -> None:
        """Says goodbye: the others do not wait for this rank."""
        session.leave()

    def close(self) -> None:
        """Leaves the job."""
        import collective

        collective.shutdown()

    def abort(self, exit_code: int) -> None:
        """Fails the collectives of every rank, and ends this one at once."""
        library.load().collective_abort(
            f"rank {self.rank} {ENDED} {exit_code}".encode()
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def ended_by_another(self, error: BaseException) -> int | None:
        """Reads the exit code out of what ``abort`` made every collective say."""
        found = re.search(rf"rank (\d+) {ENDED} (\d+)", str(error))
        if found is None or int(found[1]) == self.rank:
            return None
        return int(found[2])


def _across_hosts(environment: Environment) -> Availability:
    plugin = library.plugin()
    spread = f"{environment.size} processes, {environment.local_size} on this host"
    by_gloo = "HOROVOD_RANK" in os.environ  # horovodrun without mpirun
    by_mpi = environment.launcher in ("mpirun", "horovodrun") and not by_gloo
    by_mpi |= "PMIX_NAMESPACE" in os.environ  # srun --mpi=pmix
    if by_mpi and plugin.exists():
        return Availability(True, f"{spread}, joined by MPI")
    if by_mpi:
        return Availability(
            False,
            f"{spread}, and {plugin.name} was not built",
            "put the mpicxx of this MPI on the PATH, then: pip install -e .",
        )
    hint = "start it by mpirun, or put all processes on one host"
    if environment.launcher == "srun":
        hint = (
            "within the allocation: python -m collective.launch python train.py, which "
            "has mpirun start them (deploy/slurm.sbatch); or srun --mpi=pmix (srun "
            "--mpi=list shows what there is); or one node: srun -N 1"
        )
    return Availability(
        False, f"{spread}, and {environment.launcher} starts no MPI", hint
    )
