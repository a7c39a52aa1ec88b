"""The ``HOROVOD_*`` variables: what means something here is honoured, the rest named.

Variables that a launcher sets to tell a process its place are ``environment.py``'s.
"""

from __future__ import annotations

import logging
import os

from collective import session, timeline
from collective.errors import UsageError

LOG = logging.getLogger("collective")

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}

# Horovod's seconds, and what the core calls them.
_SECONDS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "COLLECTIVE_STALL_SECONDS",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "COLLECTIVE_TIMEOUT",
}

_NEVER = "1000000000"

IGNORED = {
    "HOROVOD_CYCLE_TIME": "collectives start when they are called, not in cycles",
    "HOROVOD_CACHE_CAPACITY": "there is no cache of responses",
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
    """Hands the variables on to the core, and names those that do nothing here.

    Called before the core is started: it reads its settings then.

    Raises:
        UsageError: If a variable holds what it cannot.
    """
    level = os.environ.get("HOROVOD_LOG_LEVEL", "")
    if level:
        if level.upper() not in _LEVELS:
            raise UsageError(
                f"HOROVOD_LOG_LEVEL={level} is no level",
                hint=f"one of: {', '.join(_LEVELS).lower()}",
            )
        LOG.setLevel(_LEVELS[level.upper()])
    for theirs, ours in _SECONDS.items():
        # 0 is "never" in Horovod, which is no choice here: nothing waits for ever.
        value = os.environ.get(theirs, "0")
        if value not in ("", "0"):
            os.environ.setdefault(ours, value)
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        os.environ.setdefault("COLLECTIVE_STALL_SECONDS", _NEVER)
    fusion_bytes()


def start_timeline() -> None:
    """Records the collectives of rank 0, if ``HOROVOD_TIMELINE`` names a file.

    And names, once and on rank 0, the variables that were ignored.
    """
    if session.called().rank != 0:
        return
    for variable, why in IGNORED.items():
        if os.environ.get(variable, "0") not in ("", "0"):
            LOG.warning("collective: %s is ignored: %s", variable, why)
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        timeline.start(path)


def fusion_bytes() -> int | None:
    """``HOROVOD_FUSION_THRESHOLD``: the bytes that gradients are sent in at a time.

    None, all at once, where it is not set. 0 is one tensor at a time.

    Raises:
        UsageError: If it is no number of bytes.
    """
    value = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if not value:
        return None
    if not value.isdecimal():
        raise UsageError(
            f"HOROVOD_FUSION_THRESHOLD={value} is no number of bytes",
            hint="as in HOROVOD_FUSION_THRESHOLD=67108864",
        )
    return max(int(value), 1)
