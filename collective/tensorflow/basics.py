"""Joining the job and this process' place in it, by Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import collective
from collective import horovod_variables, session, timeline
from collective.common.util import gloo_built, mpi_built
from collective.tensorflow.process_sets import (
    ProcessSet,
    add_process_set,
    by_id,
    check_initialized,
    forget_process_sets,
)
from collective.tensorflow_ops import ranks

is_initialized = session.is_initialized

_homogeneous = True
_ready = False  # init has done its work beyond joining
_entered = False  # this process has joined a running job


def init(
    comm: Sequence[int] | Any | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Join the job, and honour the ``HOROVOD_*`` variables that mean something here.

    A process that was started for a running job waits until the job's ranks admit it,
    in their next ``state.commit()``. From then on it calls the same collectives: the
    other ranks in their reset callbacks, this process before it calls the function that
    ``elastic.run`` wraps.

    Args:
        comm: Ranks that make up the job, or an mpi4py communicator; all ranks only.
        process_sets: Sets to make at once; or ``"dynamic"``, which is always in effect
            here.

    Raises:
        NotImplementedError: If ``comm`` is not all ranks of the job.
        CollectiveError: If the native core was not built, or a rank did not join.
    """
    global _ready
    if not session.is_initialized():
        horovod_variables.honour()
    session.init()
    if comm is not None and not _everyone(comm):
        session.shutdown()
        raise NotImplementedError(
            "init(comm=...) with some of the ranks: a job is all that its launcher "
            "started\nHINT: start fewer ranks, or use process_sets=[ProcessSet(...)]"
        )
    if _ready:
        return
    if session.is_joining():
        enter()
    else:
        _compare_hosts()
    horovod_variables.start_timeline()
    _ready = True
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def _compare_hosts() -> None:
    """Find out whether hosts have equally many ranks; all ranks of the job call it."""
    global _homogeneous
    sizes = collective.allgather(np.array([session.local_size()]), name="local sizes")
    _homogeneous = bool((sizes == sizes[0]).all())


def _everyone(comm: Any) -> bool:
    if hasattr(comm, "Get_size"):
        return comm.Get_size() == session.size()
    return sorted(comm) in ([], list(range(session.size())))


def shutdown() -> None:
    """Leave the job; ``init()`` may be called again, on every rank."""
    global _ready, _entered
    _ready = _entered = False
    if session.is_initialized():
        timeline.stop()
        forget_process_sets()
        session.shutdown()


def regroup() -> bool:
    """Continue with the ranks that are left and those that wait to join.

    All ranks call it; process sets end with the old job.

    Returns:
        Whether processes have joined, which do not have the ranks' state yet.
    """
    forget_process_sets()
    former = session.regroup()
    _compare_hosts()
    return -1 in former


def enter() -> None:
    """Join a running job; return once its ranks have called ``regroup``."""
    global _entered
    session.enter()
    _compare_hosts()
    _entered = True


def entered() -> bool:
    """Return whether this process has joined a running job."""
    return _entered


def rank() -> int:
    """Return the number of this process in the job, from 0.

    Raises:
        ValueError: Before ``init()``, as in the functions below.
    """
    return _when_initialized(lambda: session.launch_info().rank)


def size() -> int:
    """Return the number of processes in the job."""
    return _when_initialized(lambda: session.launch_info().size)


def local_rank() -> int:
    """Return the number of this process on its host."""
    return _when_initialized(lambda: session.launch_info().local_rank)


def local_size() -> int:
    """Return the number of the job's processes on this host."""
    return _when_initialized(lambda: session.launch_info().local_size)


def cross_rank() -> int:
    """Return the number of this process' host."""
    return _when_initialized(session.cross_rank)


def cross_size() -> int:
    """Return the number of hosts."""
    return _when_initialized(session.cross_size)


def is_homogeneous() -> bool:
    """Return whether every host has the same number of processes."""
    return _when_initialized(lambda: _homogeneous)


def _when_initialized(function: Callable[[], Any]) -> Any:
    check_initialized()
    return function()


# --- the same as ops: computed when the graph runs, not when it is traced ----------


def _info(process_set_id: int = 0) -> ranks.RankInfo:
    return ranks.rank_info(by_id(process_set_id).group)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return ``rank()`` as an op: int32, a scalar."""
    return tf.identity(_info().rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of processes in a process set as an op: int32, a scalar.

    Raises:
        ValueError: If there is no such set.
    """
    return tf.identity(_info(process_set_id).size, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return ``local_rank()`` as an op: int32, a scalar."""
    return tf.identity(_info().local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return ``local_size()`` as an op: int32, a scalar."""
    return tf.identity(_info().local_size, name)


def process_set_included_op(
    process_set_id: int = 0, name: str | None = None
) -> tf.Tensor:
    """Return 1 if this process is in the set, else 0, as an op: int32, a scalar.

    Raises:
        ValueError: If there is no such set.
    """
    return tf.cast(_info(process_set_id).rank >= 0, tf.int32, name)


# --- features of this build ----------------------------------------------------------


def mpi_enabled() -> bool:
    """Return whether MPI launched this job and the core can use it across hosts."""
    launched_by_mpi = session.is_initialized() and session.place().launcher in (
        "mpirun",
        "srun",
    )
    return launched_by_mpi and mpi_built()


def mpi_threads_supported() -> bool:
    """Return whether your own threads may call MPI, for example by mpi4py.

    On one host the core does not touch MPI, so they may. Across hosts it calls MPI from
    a thread of its own, at the level "serialized", so they may not.

    Raises:
        ValueError: If MPI is not enabled.
    """
    if not mpi_enabled():
        raise ValueError(
            "MPI is not enabled: this job was not started by mpirun or srun, or the "
            "native core was not built\nHINT: ask hvd.mpi_enabled() first"
        )
    return session.cross_size() == 1


# False: the core takes the place of these libraries, and reduces in host memory.
gloo_enabled = nccl_built = ddl_built = ccl_built = gloo_built
cuda_built = rocm_built = gloo_built


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record the collectives of rank 0 into a Chrome trace.

    Args:
        file_path: The file; overwritten.
        mark_cycles: Ignored: the core has no cycles.

    Raises:
        ValueError: Before ``init()``.
    """
    if rank() == 0:
        timeline.start(file_path)


def stop_timeline() -> None:
    """End the recording.

    Raises:
        ValueError: Before ``init()``.
    """
    if rank() == 0:
        timeline.stop()
