"""``horovod.tensorflow.data.compute_service``: data prepared by workers of a compute job.

A compute job (``python -m collective.tensorflow.data.compute_worker FILE`` under any
launcher) runs the workers of ``tf.data.experimental.service``. A training job reads from
the file where they are, and sends its data sets there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from collective.net import private_files
from collective.tensorflow import basics
from collective.tensorflow.data import registry

log = logging.getLogger(__name__)
_HEARTBEAT_MS = 1000


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """What a training job knows of a compute job.

    Attributes:
        dispatchers: Number of dispatchers: one for all ranks, or one for each.
        workers_per_dispatcher: Workers of each.
        dispatcher_side: Whose ranks run the dispatchers: ``compute`` or ``training``.
        addresses: By network interface: where the compute job's registry listens.
        key: Authenticates connections to it.
        timeout: Seconds to wait for dispatchers and workers to start.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes
    timeout: int = 60

    def compute_client(self, verbose: int = 1) -> Any:
        """The compute job's registry (``registry.Registry``).

        Raises:
            ConnectionError: If it does not answer.
        """
        found = [address for listed in self.addresses.values() for address in listed]
        return registry.connect(found, self.key)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**dataclasses.asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """The inverse of ``to_dict``."""
        addresses = {
            name: [(host, port) for host, port in listed]
            for name, listed in config["addresses"].items()
        }
        key = bytes.fromhex(config["key"])
        return TfDataServiceConfig(**{**config, "addresses": addresses, "key": key})

    def write(self, filename: str) -> None:
        """Writes the file whole, readable by this user only: it holds the key."""
        text = json.dumps(self.to_dict()).encode()
        partial = Path(f"{filename}.{os.getpid()}.partial")
        private_files.write(partial, text)
        partial.replace(filename)

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False
    ) -> TfDataServiceConfig:
        """Reads the file; with ``wait_for_file_creation``, as soon as there is one."""
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(1)
        return TfDataServiceConfig.from_dict(json.loads(private_files.read(filename)))


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Inside, the dispatcher for this rank serves; gives its address.

    Where dispatchers are on the training side, this rank may run it.

    Args:
        compute_config: As read from the file.
        rank: Of the training job.

    Raises:
        TimeoutError: Dispatcher or workers did not start in time.
    """
    service = compute_config.compute_client()
    number = rank if compute_config.dispatchers > 1 else 0
    timeout = compute_config.timeout
    with contextlib.ExitStack() as servers:
        if compute_config.dispatcher_side == "training" and rank == number:
            _start_dispatcher(service, number, servers)
        address = service.wait_for_dispatcher_registration(number, timeout)
        service.wait_for_dispatcher_worker_registration(number, timeout)
        yield address


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """A data set whose elements the compute job prepares.

    Args:
        dataset: What it prepares.
        compute_config: As read from the file; dispatchers on the compute side.
        rank, size: Of the training job.
        processing_mode: Of ``tf.data.experimental.service.distribute``.
        reuse_dataset: Whether all ranks share one pass over the data.
        round_robin: Whether ranks then take turns, each as many elements.

    Raises:
        RuntimeError: If dispatchers are on the training side: an address is valid
            within ``tf_data_service`` then.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "a dispatcher of the training side ends with its rank: distribute the data "
            "set within the context\n"
            "HINT: with tf_data_service(compute_config, rank) as address: ..."
        )
    in_turn = reuse_dataset and round_robin
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if in_turn else None,
                num_consumers=size if in_turn else None,
            )
        )


# As in Horovod: a method of every data set.
tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Serves data as one rank of the compute job, until the job's rank 0 ends it.

    Args:
        compute_config: The same on every rank.
    """
    basics.init()
    rank = basics.rank()
    number, place = divmod(rank, compute_config.workers_per_dispatcher)
    service = compute_config.compute_client()
    timeout = compute_config.timeout
    with contextlib.ExitStack() as servers:
        if compute_config.dispatcher_side == "compute" and place == 0:
            _start_dispatcher(service, number, servers)
        address = service.wait_for_dispatcher_registration(number, timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=address.split("://")[1],
                heartbeat_interval_ms=_HEARTBEAT_MS,
                dispatcher_timeout_ms=timeout * 1000,
            )
        )
        worker.start()
        servers.callback(_stop, worker)
        service.register_worker_for_dispatcher(number, rank)
        log.info("rank %d serves dispatcher %d at %s", rank, number, address)
        service.wait_for_shutdown()


def _start_dispatcher(service: Any, number: int, servers: contextlib.ExitStack) -> None:
    server = tf.data.experimental.service.DispatchServer()
    servers.callback(_stop, server)
    service.register_dispatcher(number, server.target)


def _stop(server: Any) -> None:
    server._stop()  # TensorFlow has no public way
    server.join()
