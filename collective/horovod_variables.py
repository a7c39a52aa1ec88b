"""The ``HOROVOD_*`` variables: those with a meaning here work, the rest give a warning.

Variables by which a launcher sets ranks and sizes are in ``environment``.
"""

from __future__ import annotations

import logging
import os

from collective import session, timeline
from collective.errors import UsageError
from collective.log import log

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}

# Horovod's seconds, and the core's variable for them.
_SECONDS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "COLLECTIVE_STALL_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "COLLECTIVE_TIMEOUT",
}

_NEVER = "1000000000"

IGNORED = {
    "HOROVOD_CYCLE_TIME": "collectives start when they are called, not in cycles",
    "HOROVOD_CACHE_CAPACITY": "it has no cache of responses",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "many hosts always reduce host by host",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "the core chooses the algorithm",
    "HOROVOD_TORUS_ALLREDUCE": "the core chooses the algorithm",
    "HOROVOD_AUTOTUNE": "there is nothing to tune",
    "HOROVOD_AUTOTUNE_LOG": "there is nothing to tune",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "the core reduces in host memory",
    "HOROVOD_NUM_NCCL_STREAMS": "there is no NCCL in the core",
    "HOROVOD_THREAD_AFFINITY": "the launcher binds processes",
    "HOROVOD_MPI_THREADS_DISABLE": "MPI is called from one thread",
    "HOROVOD_DISABLE_GROUP_FUSION": "a group is one call",
    "HOROVOD_ENABLE_XLA_OPS": "the step is not compiled by XLA",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "the core reduces in host memory",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum gathers whole tensors",
    "HOROVOD_TIMELINE_MARK_CYCLES": "there are no cycles",
}


def honour() -> None:
    """Set the core's variables from Horovod's.

    Call it before the core starts, because the core reads its settings then.

    Raises:
        UsageError: If a variable has a bad value.
    """
    level = os.environ.get("HOROVOD_LOG_LEVEL", "")
    if level:
        if level.upper() not in _LEVELS:
            raise UsageError(
                f"HOROVOD_LOG_LEVEL={level} is not a level",
                hint=f"one of: {', '.join(_LEVELS).lower()}",
            )
        log.setLevel(_LEVELS[level.upper()])
    for theirs, ours in _SECONDS.items():
        # 0 is "never" in Horovod; here every wait has a deadline.
        value = os.environ.get(theirs, "0")
        if value not in ("", "0"):
            os.environ.setdefault(ours, value)
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        os.environ.setdefault("COLLECTIVE_STALL_SECONDS", _NEVER)
    fusion_bytes()


def start_timeline() -> None:
    """Record the collectives of rank 0, if ``HOROVOD_TIMELINE`` names a file.

    Also warns of the variables that are ignored, once and on rank 0.
    """
    if session.launch_info().rank != 0:
        return
    for variable, why in IGNORED.items():
        if os.environ.get(variable, "0") not in ("", "0"):
            log.warning("%s is ignored: %s", variable, why)
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        timeline.start(path)


def fusion_bytes() -> int | None:
    """Return ``HOROVOD_FUSION_THRESHOLD``: the bytes of a bucket of gradients.

    Returns None, for one bucket, if it is not set. 0 means one tensor at a time.

    Raises:
        UsageError: If it is not a number of bytes.
    """
    value = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if not value:
        return None
    if not value.isdecimal():
        raise UsageError(
            f"HOROVOD_FUSION_THRESHOLD={value} is not a number of bytes",
            hint="for example: export HOROVOD_FUSION_THRESHOLD=67108864",
        )
    return max(int(value), 1)
