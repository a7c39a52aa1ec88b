"""Several processes: ``tf.distribute.MultiWorkerMirroredStrategy``.

Sums: TensorFlow's own collectives over gRPC, or NCCL between GPUs. Its TF_CONFIG is made
from the launch (``world``). A TF_CONFIG that is there, and srun, give each rank the
addresses of all: then it needs no MPI, on several hosts either.

Sharp bits: the backend must be made before TensorFlow's first operation, and the model in
``backend.scope()``. A rank that dies ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import numpy as np

from collective import deadline
from collective import environment as environments
from collective.backends import world
from collective.backends.base import Availability, end_process
from collective.backends.capabilities import (
    Overlap,
    ShardCollectives,
    SummedInGraph,
)
from collective.backends.devices import configure, gpus
from collective.backends.options import Options
from collective.backends.tf_strategy import StrategyBackend
from collective.buckets import reduce_flat
from collective.environment import Environment
from collective.errors import UsageError

COMMUNICATIONS = ("auto", "ring", "nccl")
_BYTES_ON_GPUS = 16 << 20  # NCCL's latency is hidden from some megabytes on


class MultiWorkerBackend(SummedInGraph, StrategyBackend, ShardCollectives, Overlap):
    """A replica in each process, summed by TensorFlow's own collectives."""

    name = "tf-multiworker"
    summary = "one replica a process, TensorFlow's collectives (MultiWorkerMirrored)"
    launcher = "mpirun"
    takes = frozenset({"communication"})

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        environment = self.environment
        if options.communication not in COMMUNICATIONS:
            raise UsageError(
                f"unknown communication {options.communication!r}",
                hint=f"communication: {' | '.join(COMMUNICATIONS)}",
            )
        if options.communication == "nccl" and not gpus():  # TensorFlow takes the ring
            raise UsageError(
                "NCCL needs GPUs, and there is none here", hint="communication='auto'"
            )
        if world.availability(environment).usable:
            self.world = world.connect(environment)
            addresses = world.exchange_addresses(environment, self.world)
        else:
            self.world, addresses = _StrategyWorld(self), environments.addresses()
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": self.rank},
        }
        os.environ["TF_CONFIG"] = json.dumps(config)
        import tensorflow as tf

        configure(options, environment, self.overlaps)
        kind = tf.distribute.experimental.CommunicationImplementation
        try:
            self.strategy = tf.distribute.MultiWorkerMirroredStrategy(
                communication_options=tf.distribute.experimental.CommunicationOptions(
                    implementation=kind[options.communication.upper()]
                )
            )
            deadline.watch(self.rank, self.abort)
        except RuntimeError as error:
            raise UsageError(
                f"backend {self.name!r} must be made before TensorFlow's first "
                f"operation: {error}",
                hint="backend = collective.backends.get('tf-multiworker') as the script's first "
                "line after its imports",
            ) from None

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable where MPI, or on one host our core, can exchange addresses, or all know."""
        found = world.availability(environment)
        if not found.usable and len(environments.addresses()) == environment.size > 1:
            what = f"{environment.size} processes by {environment.launcher}"
            return Availability(True, f"{what}, which names all addresses")
        return found

    @contextlib.contextmanager
    def only_rank_zero(self, what: str) -> Iterator[None]:
        """Makes Keras' own use of the strategy raise too: it needs every worker.

        Without this, a callback that calls ``model.evaluate`` or ``model.predict`` on
        rank 0 would wait for ever.
        """

        def refuse(*_: Any, **__: Any) -> NoReturn:
            self.require_all_ranks()
            raise AssertionError("unreachable: one worker needs no guard")

        with contextlib.ExitStack() as stack:
            stack.enter_context(super().only_rank_zero(what))
            if self.size > 1:
                for name in ("run", "experimental_distribute_dataset"):
                    stack.enter_context(mock.patch.object(self.strategy, name, refuse))
            yield

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        import tensorflow as tf

        reduce = super()._all_reduce
        # tf.identity: all_reduce refuses a tensor that has no device yet.
        return reduce_flat(
            tensors,
            lambda vector: reduce([tf.identity(vector)])[0],
            bytes_each=self.bucket_bytes,
        )

    def _default_bucket_bytes(self) -> int | None:
        """NCCL sums while the rest is computed; the ring over gRPC competes with it."""
        return _BYTES_ON_GPUS if gpus() else None

    def _broadcast_bytes(self, data: np.ndarray, root: int) -> None:
        """Over the connection that exchanged the addresses."""
        self.world.Bcast(data, root=root)

    def _barrier(self) -> None:
        """Waits for every process."""
        self.world.Barrier()

    def close(self) -> None:
        """Frees what exchanged the addresses."""
        self.world.Free()

    def abort(self, exit_code: int) -> None:
        """Ends every rank: ``MPI_Abort``, or the launcher when this one has ended."""
        self.world.Abort(exit_code)


class _StrategyWorld:
    """What ``world.connect`` gives elsewhere, by the strategy's own collectives."""

    def __init__(self, backend: MultiWorkerBackend):
        self._backend = backend

    def _sum(self, vector: np.ndarray) -> np.ndarray:
        import tensorflow as tf

        backend = self._backend
        summed = backend.run(
            lambda x: backend._all_reduce([x])[0], [tf.constant(vector)]
        )
        return np.asarray(summed)

    def Bcast(self, data: np.ndarray, root: int) -> None:
        """Overwrites a uint8 vector by the root's, to which the others add zeros."""
        mine = data if self._backend.rank == root else np.zeros_like(data)
        data[:] = self._sum(mine.astype(np.float32))  # which holds every byte exactly

    def Barrier(self) -> None:
        """Waits for every rank."""
        self._sum(np.zeros(1, np.float32))

    def Free(self) -> None:
        """Does nothing: TensorFlow's server ends with the process."""

    def Abort(self, exit_code: int) -> None:
        """Ends this rank; TensorFlow's collectives then fail on the others."""
        end_process(exit_code)
