"""Horovod: gradients by ``grouped_allreduce``, started by horovodrun or mpirun.

Sums: Horovod's background thread, over MPI, Gloo or NCCL. Between hosts gradients travel
in buckets, each as soon as back-propagation has made it; on one host as one bucket.

Sharp bits: a build of Horovod fits one TensorFlow, one MPI and one Python (``build``).
Horovod's own settings (fusion threshold, cycle time, timeline, ...) work as always, by
the options of ``horovodrun`` and by ``HOROVOD_*`` variables. A rank that dies ends the
job.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import deadline
from collective.backends.base import Availability, script_command
from collective.backends.call_names import CallNames
from collective.backends.capabilities import (
    InTurn,
    ShardCollectives,
    SummedInGraph,
    SumsInBuckets,
)
from collective.backends.devices import configure
from collective.backends.horovod import installed
from collective.backends.options import Options
from collective.buckets import by_dtype, in_buckets
from collective.environment import Environment
from collective.errors import UsageError
from collective.installation import make_command

if TYPE_CHECKING:
    import tensorflow as tf

BUILD = make_command("horovod", "python -m collective.backends.horovod.build")
# The errors of Horovod and its Gloo on the ranks that are left.
LOST = re.compile("Horovod has been shut down|gloo/transport")
# Launchers end all ranks when one has failed, so the ranks that are left wait quietly.
ENDED_BY_LAUNCHER_SECONDS = 10


class HorovodBackend(SummedInGraph, SumsInBuckets, ShardCollectives, InTurn):
    """A replica in each process, summed by Horovod."""

    name = "horovod"
    summary = "one replica a process, Horovod's grouped_allreduce (MPI or Gloo)"
    launcher = "horovodrun"

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        environment = self.environment
        try:
            import horovod.tensorflow as hvd
        except Exception as error:
            raise UsageError(f"Horovod cannot be loaded: {error}", hint=BUILD) from None
        deadline.watch(self.rank, self.abort)
        with deadline.waiting("in hvd.init()"):
            hvd.init()
        if hvd.size() != environment.size:
            raise UsageError(
                f"{environment.launcher} started {environment.size} processes, but "
                f"Horovod sees {hvd.size()}: it was built for another MPI or for none",
                hint=f"{BUILD}, or horovodrun --gloo -np {environment.size} ...",
            )
        self.hvd = hvd
        self._names = CallNames()
        self._group: dict[str, Any] = {}  # arguments of a collective within a group
        configure(options, environment, self.overlaps)

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Return whether a launcher and a Horovod for this TensorFlow are there."""
        misfit = installed.misfit()
        if misfit:
            return Availability(False, misfit, BUILD)
        started = f"{environment.size} processes by {environment.launcher}"
        if environment.launcher in ("horovodrun", "mpirun"):
            return Availability(True, started)
        if not environment.launched:
            started = "one process, started without horovodrun"
        return Availability(False, started, f"horovodrun -np 4 {script_command()}")

    def _form_groups(self, groups: Sequence[Sequence[int]], number: int) -> None:
        """Make a process set of each group; all ranks make all of them.

        Horovod has one of all ranks, which it does not make again, and none is needed of
        one rank.
        """
        self._names = CallNames()
        if len(groups) == 1:
            return
        try:
            sets = [
                self.hvd.add_process_set(self.hvd.ProcessSet(list(group)))
                for group in groups
                if len(group) > 1
            ]
        except ValueError as error:
            raise UsageError(
                f"Horovod makes no groups of ranks: {error}",
                hint="HOROVOD_DYNAMIC_PROCESS_SETS=1 for every rank",
            ) from None
        mine = next((made for made in sets if made.included()), None)
        self._group = {} if mine is None else {"process_set": mine}
        self._names.prefix = f"ranks {'_'.join(map(str, groups[number]))} "

    def _all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.size == 1:
            return tensors
        tensors = [_computed(tensor) for tensor in tensors]
        out: list[Any] = [None] * len(tensors)
        for bucket in in_buckets(tensors, self.bucket_bytes):
            for indices in by_dtype(tensors, bucket):
                sums = self.hvd.grouped_allreduce(
                    [tensors[i] for i in indices],
                    op=self.hvd.Sum,
                    name=self._names.next(),
                    ignore_name_scope=True,
                    **self._group,
                )
                for i, total in zip(indices, sums, strict=True):
                    out[i] = total
        return out

    def _gather_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        name = self._names.next()
        return self.hvd.allgather(_computed(tensor), name=name, **self._group)

    def _broadcast_bytes(self, data: np.ndarray, root: int) -> None:
        name = "broadcast_array"
        if self.size == 1:
            return
        if self._group:
            members = self._group["process_set"].ranks
            root, name = members[root], f"{name}_{members}"
        data[:] = self.hvd.broadcast(data, root_rank=root, name=name, **self._group)

    def _barrier(self) -> None:
        """Broadcast: Horovod starts no broadcast before every rank has called it."""
        self._broadcast_bytes(np.zeros(1, np.uint8), root=0)

    def close(self) -> None:
        """End Horovod on all ranks."""
        self.hvd.shutdown()

    def ended_by_another(self, error: BaseException) -> int | None:
        """Wait for the launcher to end this rank, if Horovod lost another rank."""
        if not LOST.search(str(error)):
            return None
        time.sleep(ENDED_BY_LAUNCHER_SECONDS)
        print(
            f"rank {self.rank}: error: another rank has left the job\n"
            "HINT: let every rank take the same steps; see what the others printed; "
            "if one was killed, resume from a checkpoint",
            file=sys.stderr,
            flush=True,
        )
        return 1


def _computed(tensor: tf.Tensor) -> Any:
    """Return the tensor in a form that TensorFlow does not take for a constant.

    TensorFlow computes whatever follows from constants while it optimizes a graph, on
    each rank at a moment of its own and as often as it likes. It does so with Horovod's
    ops, too, because they are not marked as stateful.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return tensor
    return tf.compat.v1.placeholder_with_default(tensor, tensor.shape)
