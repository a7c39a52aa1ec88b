"""Devices and threads of this process, set before TensorFlow starts."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

from collective.backends.options import Options
from collective.environment import Environment, cores_per_process
from collective.environment.gpus import granted
from collective.errors import UsageError
from collective.log import log


@functools.cache
def gpus() -> int:
    """Return how many GPUs TensorFlow can use here, by its build, driver and job.

    It does not start TensorFlow, and imports it only if the job has a GPU.
    """
    if not granted():
        return 0
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def tensorflow_has_started() -> bool:
    """Return whether its devices exist: then their settings cannot change any more."""
    if "tensorflow" not in sys.modules:
        return False
    # There is no public way to ask without starting it.
    from tensorflow.python.eager import context

    found = context.context_safe()
    return found is not None and found._context_handle is not None


def configure(
    options: Options,
    environment: Environment,
    overlaps: bool = False,
    devices_each: int = 1,
) -> None:
    """Share out cores and GPUs. Must run before TensorFlow's first operation.

    A process among n on a host gets its share of the cores and, if there are GPUs,
    the GPUs of its local rank. GPU memory is allocated when it is needed.

    Args:
        options: ``threads`` is read from them.
        environment: This process' place on its host.
        overlaps: Whether gradients are sent while others are computed. TensorFlow then
            gets a second thread for its operations: with only one, a tensor that is
            ready to be sent waits until nothing is left to compute.
        devices_each: GPUs of a process.
    """
    import tensorflow as tf

    _keep_freed_memory()
    threads = options.threads or cores_per_process(environment)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(
            max(threads, 2) if overlaps else threads
        )
        physical = tf.config.get_visible_devices("GPU")
        if physical and environment.local_size > 1:
            physical = _own(physical, environment, devices_each)
            tf.config.set_visible_devices(physical, "GPU")
        for gpu in physical:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        # TensorFlow has started, so the user's own script has already decided.
        visible = len(tf.config.list_logical_devices("GPU"))
        if environment.local_size > 1 and visible > devices_each:
            log.warning(
                f"rank {environment.rank} holds all {visible} GPUs that TensorFlow sees, "
                f"as do the other {environment.local_size - 1} ranks of this host: "
                "TensorFlow started before the backend was made\n"
                "HINT: make the backend (collective.backends.get) or call "
                "tf.config.set_visible_devices before any TensorFlow operation"
            )


def _own(physical: list[Any], environment: Environment, each: int) -> list[Any]:
    """Return this rank's GPUs among those it sees, which may be only its own."""
    if len(physical) <= each:
        return physical
    first = environment.local_rank * each
    if each == 1:  # ranks may share a GPU
        first %= len(physical)
    elif first + each > len(physical):
        raise UsageError(
            f"{environment.local_size} ranks with {each} GPUs each need more than the "
            f"{len(physical)} GPUs of this host",
            hint="fewer ranks or devices, or CUDA_VISIBLE_DEVICES= to train on CPUs",
        )
    return physical[first : first + each]


def _keep_freed_memory() -> None:
    """Make the C library keep memory that TensorFlow frees, for the next step.

    By default glibc returns large blocks to the kernel at once, so each step would get
    its activations and gradients from the kernel again, which clears every page. The
    numbers are M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3).
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library than glibc
        return
    most = 2**31 - 1
    mallopt(-1, most)
    mallopt(-3, most)


def local_devices(count: int | None) -> list[str]:
    """Return names of so many devices, by default all GPUs or two logical CPUs.

    Raises:
        UsageError: If there are GPUs, but fewer, or if TensorFlow has already started
            with fewer logical devices.
    """
    import tensorflow as tf

    physical = tf.config.get_visible_devices("GPU")
    if physical and count is not None and count > len(physical):
        raise UsageError(
            f"{count} devices were asked for, and this process sees {len(physical)} "
            f"GPU{'s' * (len(physical) > 1)}",
            hint=f"{len(physical)} devices, or CUDA_VISIBLE_DEVICES= for logical CPUs",
        )
    if physical:
        return [f"/gpu:{i}" for i in range(count or len(physical))]
    count = count or 2
    cpu = tf.config.list_physical_devices("CPU")[0]
    made = tf.config.get_logical_device_configuration(cpu)
    if not made or len(made) < count:
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * count
            )
        except RuntimeError:
            raise UsageError(
                f"{count} logical CPU devices were asked for, but TensorFlow has "
                "already started with fewer",
                hint="make the backend (collective.backends.get) before any TensorFlow operation",
            ) from None
    return [f"/cpu:{i}" for i in range(count)]
