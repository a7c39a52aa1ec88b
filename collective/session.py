"""Joining and leaving the job, and this process' place in it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil

from collective import library, mpi_library, recorder
from collective.elastic import membership_file
from collective.environment import Environment, detect_rank
from collective.environment.base import MAX_NP, place_on
from collective.errors import CollectiveError

_place: Environment | None = None
_process = 0  # the process that joined: a fork of it is not a rank
# The launcher's place for a process that joins a running job, until it has joined.
_launch_info: Environment | None = None


def init(environment: Environment | None = None) -> None:
    """Join the job; return once every rank has joined.

    Under ``collectiverun --min-np``, ranks that exited earlier are left out.

    Calling it again does nothing. A process that no launcher started is a job of one.
    So is a process that joins a running job, until it calls ``enter``.

    Args:
        environment: This process' place; by default the place that the launcher says.

    Raises:
        CollectiveError: If the native core was not built, or a rank did not join.
    """
    global _place, _process, _launch_info
    if _place is not None:
        return
    library.extension()  # if it was not built, raise before other ranks meet this one
    launched = environment or detect_rank()
    place, _launch_info = launched.current, launched if launched.joining else None
    if _launch_info is None:
        membership_file.write_state(membership_file.JOINING)
    if place.size > place.local_size:
        mpi_library.load_between_hosts(place)
    library.check_code(
        library.load().collective_init(
            place.rank,
            place.size,
            place.local_rank,
            place.local_size,
            job_name(place).encode(),
        )
    )
    info = (ctypes.c_int32 * 4)()  # collective_ranks of native/c_api.h
    library.check_code(library.load().collective_rank_info(0, info))
    if info[1] < place.size:  # others had exited before
        place = place_on(place.launcher, info[0], [0] * info[1])
    _place, _process = place, os.getpid()
    if _launch_info is None:
        membership_file.write_state(membership_file.JOINED)
    recorder.start(place, job_name(place), launched.rank)
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the job. Handles that were not waited for end with an error.

    Ranks that still wait for this one get an error. ``init()`` may be called again, by
    every rank.
    """
    global _place
    if _place is None or _process != os.getpid():
        return
    _place = None
    atexit.unregister(shutdown)
    library.check_code(library.load().collective_shutdown())
    recorder.close()


def lost() -> bool:
    """Return whether ranks died or left, and the others can continue."""
    return _place is not None and bool(library.load().collective_lost())


def regroup(admits: bool = True) -> list[int]:
    """Continue with the ranks that are left, renumbered in their old order.

    Every surviving rank must call this, after ``lost()`` or by agreement, or die, or
    ``leave``. Joining processes get the highest ranks. Process sets end with the old
    job.

    Args:
        admits: Whether processes that wait to join do so; that of the first rank counts.

    Returns:
        The old rank of each new rank; -1 for a process that joined.

    Raises:
        CollectiveError: If a rank that lives did not call this in time.
    """
    return _meet(partial(library.load().collective_reconfigure, int(admits)))


def waiting() -> int:
    """Return how many processes wait to join, on rank 0; else 0."""
    if MAX_NP not in os.environ or _place is None:
        return 0
    return library.load().collective_pending_joins()


def is_joining() -> bool:
    """Return whether this process is to join a running job, and has not yet."""
    return _launch_info is not None


def enter() -> list[int]:
    """Join the running job; return once its ranks have admitted this process.

    Returns:
        As ``regroup``.
    """
    global _launch_info
    before = signal.getsignal(signal.SIGINT)
    ends_at_once = threading.current_thread() is threading.main_thread()
    if ends_at_once:  # Python would hear Ctrl-C only after this process has joined
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    former = _meet(library.load().collective_late_join)
    if ends_at_once:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    _launch_info = None
    membership_file.write_state(membership_file.JOINED)
    return former


def leave() -> None:
    """Leave a job that continues without this rank: the others call ``regroup``."""
    membership_file.write_state(membership_file.LEFT)
    if place().size > place().local_size:
        library.check_code(library.load().collective_depart())
    shutdown()


def _meet(how: Callable[..., int]) -> list[int]:
    global _place
    launcher = place().launcher
    rank, size = ctypes.c_int32(), ctypes.c_int32()
    library.check_code(how(ctypes.byref(rank), ctypes.byref(size)))
    hosts, former = (ctypes.c_int32 * size.value)(), (ctypes.c_int32 * size.value)()
    library.check_code(library.load().collective_hosts(hosts, former))
    _place = place_on(launcher, rank.value, list(hosts))
    recorder.reopen(_place, _launch_info)
    return list(former)


def is_initialized() -> bool:
    """Return whether this process is in a job."""
    return _place is not None


def place() -> Environment:
    """Return this process' place in the job; an error before ``init()``."""
    if _place is None:
        raise CollectiveError(
            "collective is not initialized", hint="call collective.init() first"
        )
    return _place


def launch_info() -> Environment:
    """Return ``place()``, or the launcher's place before this process is in the job."""
    return _launch_info or place()


def rank() -> int:
    """Return the number of this process in the job, from 0."""
    return place().rank


def size() -> int:
    """Return the number of processes in the job."""
    return place().size


def local_rank() -> int:
    """Return the number of this process on its host."""
    return place().local_rank


def local_size() -> int:
    """Return the number of the job's processes on this host."""
    return place().local_size


def cross_rank() -> int:
    """Return this host's number among those with a process of this local rank."""
    return place().cross_rank


def cross_size() -> int:
    """Return the number of hosts with a process of this local rank."""
    return place().cross_size


def job_name(place: Environment, variables: Mapping[str, str] | None = None) -> str:
    """Return a name that only this job's ranks on this host share.

    Raises:
        CollectiveError: If the launcher left nothing that identifies the job.
    """
    env = os.environ if variables is None else variables
    if place.size == 1:
        return env.get("COLLECTIVE_JOB") or f"alone {os.getpid()}"
    name = env.get("COLLECTIVE_JOB") or _name_by_launcher(place, env)
    if place.size == place.local_size:
        return name
    # The ranks of one host meet by this name. Containers may share a network, and with
    # it the names by which processes meet, and even the host name. A daemon of mpirun's
    # starts the ranks of one host and no others.
    daemon = next((env[key] for key in _DAEMONS if key in env), socket.gethostname())
    return f"{name} on {daemon}"


# The variables that hold the address of a rank's PMIx daemon, of Open MPI or Slurm.
_DAEMONS = [f"PMIX_SERVER_URI{version}" for version in (41, 4, 3, 21, 2)]


def _name_by_launcher(place: Environment, env: Mapping[str, str]) -> str:
    names = {
        "horovodrun": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
        "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        "PMIx": ("PMIX_NAMESPACE",),
    }.get(place.launcher, ())
    name = " ".join(env[part] for part in names if part in env)
    if not name and place.launcher in ("mpirun", "horovodrun"):
        name = (
            env.get("PMIX_NAMESPACE")
            or env.get("OMPI_MCA_ess_base_jobid")
            or _hydra_process()
        )
    if place.launcher == "TF_CONFIG":
        name = json.dumps(json.loads(env["TF_CONFIG"])["cluster"], sort_keys=True)
    if not name:
        raise CollectiveError(
            f"cannot identify this job: {place.launcher or 'no launcher'} "
            "left no name for it",
            hint="give every rank the same: export COLLECTIVE_JOB=$RANDOM$RANDOM",
        )
    return f"{place.launcher} {name}"


def _hydra_process() -> str:
    """Return the process of MPICH that started the ranks: its mpirun names no job."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            if process.name().startswith("hydra_pmi"):
                # psutil's start time may differ from rank to rank.
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")
                return f"{process.pid} {fields[2].split()[19]}"
    return ""
