"""Several processes: the collectives of ``tf.distribute.MultiWorkerMirroredStrategy``.

Sums: TensorFlow's own collectives over gRPC, or NCCL between GPUs. Its TF_CONFIG is
made from the launch (``world``). An existing TF_CONFIG, or srun, gives each rank the
addresses of all ranks: then MPI is not needed, even on several hosts.

The strategy connects the processes. The step does not run in it: under ``strategy.run``
TensorFlow forbids most assignments, and a model must be made in its scope. The step
calls the op by which the strategy itself sums.

Sharp bits: the backend must be made before TensorFlow's first operation. A rank that dies
ends the job.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from collective import deadline
from collective import environment as environments
from collective.backends import world
from collective.backends.base import Availability, end_process
from collective.backends.call_names import CallNames
from collective.backends.capabilities import (
    ShardCollectives,
    SummedInGraph,
    SumsInBuckets,
)
from collective.backends.devices import configure, gpus
from collective.backends.options import Options
from collective.buckets import reduce_flat
from collective.environment import Environment
from collective.environment.gpus import are_shared, of_host
from collective.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf

COMMUNICATIONS = ("auto", "ring", "nccl")
_ALL = 0x636F6C6C  # the key of all ranks; the strategy counts its own from 1
_DTYPES = {"bfloat16", "float16", "float32", "float64", "int32", "int64"}
_PRIMES = 1000003, 2**31 - 1
_BYTES_ON_GPUS = 16 << 20  # NCCL's latency is hidden from some megabytes on


class MultiWorkerBackend(SummedInGraph, ShardCollectives, SumsInBuckets):
    """A replica in each process, summed by TensorFlow's own collectives."""

    name = "tf-multiworker"
    summary = "one replica a process, TensorFlow's collectives (MultiWorkerMirrored)"
    launcher = "collectiverun"
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
        if options.communication == "nccl" and are_shared(environment):
            raise UsageError(
                f"the {environment.local_size} ranks of this host share {of_host()} "
                f"GPU{'s' * (of_host() > 1)}, which NCCL refuses",
                hint="a rank for each GPU; or communication='ring'; or backend native",
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
            self.tf_strategy = tf.distribute.MultiWorkerMirroredStrategy(
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
        deadline.watch(self.rank, self.abort)
        self._device = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
        self._hint = options.communication
        if self._hint == "auto" and self._device != "CPU:0":
            # TensorFlow's own "auto" is a ring, also between GPUs.
            self._hint = "ring" if are_shared(environment) else "nccl"
        self._names = CallNames()
        self._key, self._keys = _ALL, itertools.count(_ALL + 1)
        with tf.device(self._device):  # the ops that have it run one after the other
            self._order = tf.Variable(0.0, trainable=False, name="collective_order")

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Return whether it is usable: if the ranks know or can exchange addresses."""
        found = world.availability(environment)
        if not found.usable and len(environments.addresses()) == environment.size > 1:
            what = f"{environment.size} processes by {environment.launcher}"
            return Availability(True, f"{what}, which names all addresses")
        return found

    def _form_groups(self, groups: Sequence[Sequence[int]], number: int) -> None:
        """Give each group a key of its own, by which TensorFlow knows its members."""
        keys = [next(self._keys) for _ in groups]  # all ranks count alike
        self._key, self._names = keys[number], CallNames()
        self.world = _StrategyWorld(self)

    def _all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.size == 1:
            return tensors
        return reduce_flat(tensors, self._summed, bytes_each=self.bucket_bytes)

    def _summed(self, vector: tf.Tensor) -> tf.Tensor:
        """Return the sum of a vector over the ranks, of any numeric dtype."""
        import tensorflow as tf

        dtype = vector.dtype
        if dtype.name in _DTYPES:
            return self._collective(vector)
        if dtype.is_complex:
            parts = tf.stack([tf.math.real(vector), tf.math.imag(vector)])
            return tf.complex(*tf.unstack(self._collective(parts)))
        wide = tf.int32 if dtype.size < 4 else tf.int64
        return tf.cast(self._collective(tf.cast(vector, wide)), dtype)

    def _collective(self, vector: tf.Tensor) -> tf.Tensor:
        """Sum vectors of one length; ranks match the calls by their key."""
        import tensorflow as tf

        name = f"{self._names.next()} {vector.dtype.name}".encode()
        with tf.device(self._device):
            size = vector.shape.num_elements()
            if size is None:
                size = tf.size(vector, tf.int64)  # on a GPU: the vector stays there
            with tf.device("CPU:0"):
                key = (zlib.crc32(name) + size * _PRIMES[0]) % _PRIMES[1]
                key = tf.cast(key, tf.int32)
            return tf.raw_ops.CollectiveReduceV2(
                input=vector,
                group_size=self.size,
                group_key=self._key,
                instance_key=key,
                ordering_token=[self._order.handle],
                merge_op="Add",
                final_op="Id",
                communication_hint=self._hint,
            )

    def _default_bucket_bytes(self) -> int | None:
        """Return a size for NCCL only: the ring competes with the computation."""
        return _BYTES_ON_GPUS if gpus() else None

    def _broadcast_bytes(self, data: np.ndarray, root: int) -> None:
        """Broadcast over the connection that exchanged the addresses."""
        self.world.Bcast(data, root=root)

    def _barrier(self) -> None:
        """Wait for every process."""
        self.world.Barrier()

    def close(self) -> None:
        """Close the connection that exchanged the addresses."""
        self.world.Free()

    def abort(self, exit_code: int) -> None:
        """End every rank by ``MPI_Abort``, or by the launcher after this one."""
        self.world.Abort(exit_code)


class _StrategyWorld:
    """The methods of ``world.connect``'s result, by TensorFlow's own collectives."""

    def __init__(self, backend: MultiWorkerBackend):
        self._backend = backend

    def _sum(self, vector: np.ndarray) -> np.ndarray:
        import tensorflow as tf

        backend = self._backend
        return np.asarray(backend._all_reduce([tf.constant(vector)])[0])

    def Bcast(self, data: np.ndarray, root: int) -> None:
        """Overwrite a uint8 vector by the root's, to which the others add zeros."""
        mine = data if self._backend.rank == root else np.zeros_like(data)
        data[:] = self._sum(mine.astype(np.float32))  # float32 holds every byte exactly

    def Barrier(self) -> None:
        """Wait for every rank."""
        self._sum(np.zeros(1, np.float32))

    def Free(self) -> None:
        """Do nothing: TensorFlow's server ends with the process."""

    def Abort(self, exit_code: int) -> None:
        """End this rank; TensorFlow's collectives then fail on the others."""
        end_process(exit_code)
