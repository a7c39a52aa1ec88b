"""Fixes everything on which a training's bits depend, with a number of virtual replicas.

Several threads compute a convolution or a matrix product of a piece in another order than
one thread, and another processor has other instructions. So these are fixed if they can be,
and else compared between ranks.
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

#: Threads of an operation if the user does not choose them.
THREADS = 1
# Flags of a processor that choose a kernel of TensorFlow or oneDNN.
_VECTOR = re.compile(r"^(avx|amx|fma|sse4|f16c|asimd|sve|bf16|i8mm)")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Have TensorFlow's operations give the same bits in each run while inside.

    Its graph optimizer is off. It rewrites ``(a + b) + (c + d)`` as one sum from left to
    right. It also fuses operations by the number of their readers, which depends on the
    number of pieces of a process.
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
    """Return the threads of one operation; TensorFlow takes all cores if none are set."""
    chosen = int(tf.config.threading.get_intra_op_parallelism_threads())
    return chosen or len(os.sched_getaffinity(0))


def describe(virtual: VirtualReplicas) -> dict[str, str]:
    """Return further settings of this rank that change bits, beyond ``describe_settings``."""
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
    """Compare the ranks' settings; every rank calls it."""
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
    """Return the vector instructions of this processor, or its architecture if unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    flags = found[1].split() if found else []
    return " ".join([platform.machine(), *sorted(filter(_VECTOR.match, flags))])
