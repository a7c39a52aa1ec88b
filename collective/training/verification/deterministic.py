"""What the bits of a training depend on besides the number of virtual replicas.

A convolution or a matrix product of a piece is computed by several threads in another
order than by one, and by other instructions on another processor. So these are fixed
where they can be, and compared between ranks where they cannot.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from collective.backends.base import Backend
from collective.log import log
from collective.training.keras_compat.tensorflow_names import determinism
from collective.training.verification import ranks
from collective.training.virtual.pieces import VirtualReplicas

#: Threads of an operation, where the user chooses none.
THREADS = 1
# Flags of a processor that choose a kernel of TensorFlow or oneDNN.
_VECTOR = re.compile(r"^(avx|amx|fma|sse4|f16c|asimd|sve|bf16|i8mm)")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """TensorFlow's operations give the same bits in each run, within the context.

    Its graph optimizer is off: it rewrites ``(a + b) + (c + d)`` as one sum from left to
    right, and fuses operations by how many others read them, and that is one for each
    piece that a process has.
    """
    before = determinism.is_enabled()  # no public function switches it off
    tf.config.experimental.enable_op_determinism()
    off = "disable_meta_optimizer"
    was_off = tf.config.optimizer.get_experimental_options().get(off, False)
    tf.config.optimizer.set_experimental_options({off: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({off: was_off})
        determinism.enable(before)


def intra_op_threads() -> int:
    """Threads of one operation; TensorFlow takes all cores where none are set."""
    chosen = int(tf.config.threading.get_intra_op_parallelism_threads())
    return chosen or len(os.sched_getaffinity(0))


def describe(virtual: VirtualReplicas) -> dict[str, str]:
    """What the bits depend on, on this rank, by name, besides ``describe_settings``."""
    return {
        "virtual_replicas=": str(virtual.count),
        "intra-op threads": str(intra_op_threads()),
        "instruction set": _instruction_set(),
        "GPUs": str(
            [
                tf.config.experimental.get_device_details(gpu).get("device_name")
                for gpu in tf.config.list_physical_devices("GPU")
            ]
            or "none"
        ),
    }


def agree(virtual: VirtualReplicas, backend: Backend) -> None:
    """Compares the ranks' settings; every rank calls it."""
    threads = intra_op_threads()
    if threads != THREADS and backend.options.threads is None and backend.rank == 0:
        log.warning(
            "virtual replicas: TensorFlow has been set up with %d intra-op threads, and "
            "the bits are those of %d threads. For those of one: collective.backends."
            "get(name, collective.backends.Options(threads=1)) before TensorFlow's "
            "first operation, or virtual_replicas= with the backend's name",
            threads,
            threads,
        )
    if backend.size > 1:
        ranks.compare(backend, describe(virtual))


def _instruction_set() -> str:
    """The vector instructions of this processor; its architecture where that is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    flags = found[1].split() if found else []
    return " ".join([platform.machine(), *sorted(filter(_VECTOR.match, flags))])
