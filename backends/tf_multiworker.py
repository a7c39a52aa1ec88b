"""Several processes: ``tf.distribute.MultiWorkerMirroredStrategy``.

Sums: TensorFlow's own collectives over gRPC, or NCCL between GPUs. Its TF_CONFIG is made
from the launch (``world``); the user writes none.

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

from collective.backends import world
from collective.backends.base import Availability
from collective.backends.capabilities import Overlap, ShardCollectives
from collective.backends.devices import configure, gpus
from collective.backends.options import Options
from collective.backends.tf_strategy import StrategyBackend
from collective.buckets import in_buckets, reduce_flat
from collective.environment import Environment
from collective.errors import UsageError

COMMUNICATIONS = ("auto", "ring", "nccl")
_BYTES_ON_GPUS = 16 << 20  # NCCL's latency is hidden from some megabytes on


class MultiWorkerBackend(StrategyBackend, ShardCollectives, Overlap):
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
        self.world = world.connect(environment)
        config = {
            "cluster": {"worker": world.exchange_addresses(environment, self.world)},
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
        except RuntimeError as error:
            raise UsageError(
                f"backend {self.name!r} must be made before TensorFlow's first "
                f"operation: {error}",
                hint="backend = collective.backends.get('tf-multiworker') as the script's first "
                "line after its imports",
            ) from None

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Usable where MPI, or on one host our core, can exchange addresses."""
        return world.availability(environment)

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
        totals: list[Any] = [None] * len(tensors)
        for bucket in in_buckets(tensors, self.bucket_bytes):
            # tf.identity: all_reduce refuses a tensor that has no device yet.
            sums = reduce_flat(
                [tensors[i] for i in bucket], lambda v: reduce([tf.identity(v)])[0]
            )
            for i, total in zip(bucket, sums, strict=True):
                totals[i] = total
        return totals

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
