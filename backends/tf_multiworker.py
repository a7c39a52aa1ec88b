"""Several processes: ``tf.distribute.MultiWorkerMirroredStrategy``.

Its TF_CONFIG is made from the launch, so that nobody has to write one (``addresses``).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import numpy as np

from collective.backends import addresses
from collective.backends.base import Availability, Options
from collective.backends.devices import configure, gpus
from collective.backends.flat_buffer import fused
from collective.backends.tf_strategy import StrategyBackend
from collective.environment import Environment, detect
from collective.errors import UsageError

COMMUNICATIONS = ("auto", "ring", "nccl")


class MultiWorkerBackend(StrategyBackend):
    """A replica in each process, summed by TensorFlow's own collectives."""

    name = "tf-multiworker"
    launcher = "mpirun"
    summary = "one replica a process, TensorFlow's collectives (MultiWorkerMirrored)"
    own_options = ("communication",)

    def __init__(self, options: Options, environment: Environment | None = None):
        environment = environment or detect()
        super().__init__(options, environment)
        if options.communication not in COMMUNICATIONS:
            raise UsageError(
                f"unknown communication {options.communication!r}",
                hint=f"--communication {' | '.join(COMMUNICATIONS)}",
            )
        if options.communication == "nccl" and not gpus():  # TensorFlow takes the ring
            raise UsageError(
                "NCCL needs GPUs, and there is none here", hint="--communication auto"
            )
        self.world = addresses.world(environment)
        config = {
            "cluster": {"worker": addresses.exchange(environment, self.world)},
            "task": {"type": "worker", "index": self.rank},
        }
        os.environ["TF_CONFIG"] = json.dumps(config)
        import tensorflow as tf

        configure(options, environment)
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
        return addresses.availability(environment)

    @contextlib.contextmanager
    def only_rank_zero(self, what: str) -> Iterator[None]:
        """Makes Keras' own use of the strategy raise too: it talks to every worker.

        ``model.evaluate`` and ``model.predict`` do so; without this, a callback that
        calls them on rank 0 would wait for the others for ever.
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
        return fused(tensors, lambda vector: reduce([tf.identity(vector)])[0])

    def _broadcast_array(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """The root's array, by what exchanged the addresses."""
        return self.world.bcast(array, root=root)

    def _barrier(self) -> None:
        """Waits for every process."""
        self.world.Barrier()

    def abort(self, exit_code: int) -> None:
        """Ends every rank: ``MPI_Abort``, or the launcher when this one has ended."""
        self.world.Abort(exit_code)
