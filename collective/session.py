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
from pathlib import Path

import psutil

from collective import library, mpi_library, recorder
from collective.elastic import membership_file
from collective.environment import Environment, detect_rank
from collective.environment.base import MAX_NP, place_on
from collective.errors import CollectiveError

_place: Environment | None = None
_process = 0  # that joined: a fork of it is not a rank
# Of a process that joins a running job, until it has joined.
_launch_info: Environment | None = None


def init(environment: Environment | None = None) -> None:
    """Joins the job: returns when every rank of it has come.

    Under ``collectiverun --min-np``, those are left out that ended before.

    Calling it again does nothing. A process that nothing launched is a job of one, and
    so is one that comes to a job that runs, until it calls ``enter``.

    Args:
        environment: This process' place; what the launcher says by default.

    Raises:
        CollectiveError: If the native core was not built, or a rank did not come.
    """
    global _place, _process, _launch_info
    if _place is not None:
        return
    library.extension()  # if it was not built, say so before others meet this rank
    launched = environment or detect_rank()
    place, _launch_info = launched.current, launched if launched.joining else None
    if _launch_info is None:
        membership_file.write(membership_file.JOINING)
    if place.size > place.local_size:
        mpi_library.load_between_hosts(place)
    library.check(
        library.load().collective_init(
            place.rank,
            place.size,
            place.local_rank,
            place.local_size,
            job_name(place).encode(),
        )
    )
    info = (ctypes.c_int32 * 4)()  # collective_ranks of native/c_api.h
    library.check(library.load().collective_rank_info(0, info))
    if info[1] < place.size:  # others had exited before
        place = place_on(place.launcher, info[0], [0] * info[1])
    _place, _process = place, os.getpid()
    if _launch_info is None:
        membership_file.write(membership_file.JOINED)
    recorder.start(place, job_name(place), launched.rank)
    atexit.register(shutdown)


def shutdown() -> None:
    """Leaves the job. Handles that were not waited for end with an error.

    Ranks that still wait for this one get an error. ``init()`` may be called again, on
    every rank.
    """
    global _place
    if _place is None or _process != os.getpid():
        return
    _place = None
    atexit.unregister(shutdown)
    library.check(library.load().collective_shutdown())
    recorder.close()


def lost() -> bool:
    """Whether the job is broken because ranks died or left, and the others can continue."""
    return _place is not None and bool(library.load().collective_lost())


def regroup() -> list[int]:
    """Continues with the ranks that are left, renumbered in their old order.

    All of them call it, where ``lost()``, or where they have agreed to; or die, or
    ``leave``. Those who wait to come in follow behind. Process sets end with the old
    job.

    Returns:
        By rank, what number it had before; -1: it was not there.

    Raises:
        CollectiveError: If a rank that lives did not come in time.
    """
    return _meet(library.load().collective_reconfigure)


def waiting() -> int:
    """How many processes wait to come in, on rank 0 of a job that may grow; else 0."""
    if MAX_NP not in os.environ or _place is None:
        return 0
    return library.load().collective_pending_joins()


def is_joining() -> bool:
    """Whether this process has come to a job that runs, and is not in it yet."""
    return _launch_info is not None


def enter() -> list[int]:
    """Comes into the job that runs: returns when its ranks have met this one.

    Returns:
        As ``regroup``.
    """
    global _launch_info
    before = signal.getsignal(signal.SIGINT)
    ends_at_once = threading.current_thread() is threading.main_thread()
    if ends_at_once:  # Python would hear Ctrl-C only when it is in
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    former = _meet(library.load().collective_late_join)
    if ends_at_once:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    _launch_info = None
    membership_file.write(membership_file.JOINED)
    return former


def leave() -> None:
    """Leaves a job that continues without this rank: the others ``regroup``."""
    membership_file.write(membership_file.LEFT)
    if place().size > place().local_size:
        library.check(library.load().collective_depart())
    shutdown()


def _meet(how: Callable[..., int]) -> list[int]:
    global _place
    launcher = place().launcher
    rank, size = ctypes.c_int32(), ctypes.c_int32()
    library.check(how(ctypes.byref(rank), ctypes.byref(size)))
    hosts, former = (ctypes.c_int32 * size.value)(), (ctypes.c_int32 * size.value)()
    library.check(library.load().collective_hosts(hosts, former))
    _place = place_on(launcher, rank.value, list(hosts))
    recorder.reopen(_place, _launch_info)
    return list(former)


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _place is not None


def place() -> Environment:
    """This process' place in the job; a CollectiveError before ``init()``."""
    if _place is None:
        raise CollectiveError(
            "collective is not initialized", hint="call collective.init() first"
        )
    return _place


def launch_info() -> Environment:
    """As ``place``; of a process that is not in the job yet, what the launcher says."""
    return _launch_info or place()


def rank() -> int:
    """Number of this process in the job, from 0."""
    return place().rank


def size() -> int:
    """Number of processes in the job."""
    return place().size


def local_rank() -> int:
    """Number of this process on its host."""
    return place().local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return place().local_size


def cross_rank() -> int:
    """Number of this process' host, of those with a process of this local rank."""
    return place().cross_rank


def cross_size() -> int:
    """Number of hosts, of those with a process of this local rank."""
    return place().cross_size


def job_name(place: Environment, variables: Mapping[str, str] | None = None) -> str:
    """A name that the job's ranks on this host share, and no other ranks of the user.

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
    # it the names by which processes meet, and even the host name: a daemon of mpirun's
    # starts the ranks of one host and no others.
    daemon = next((env[key] for key in _DAEMONS if key in env), socket.gethostname())
    return f"{name} on {daemon}"


# Where PMIx, of Open MPI or Slurm, says how a rank reaches the daemon that started it.
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
    """MPICH's mpirun names no job: the process that started its ranks does."""
    with contextlib.suppress(psutil.Error, OSError):
        for process in psutil.Process().parents():
            if process.name().startswith("hydra_pmi"):
                # psutil's start time may differ from rank to rank.
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")
                return f"{process.pid} {fields[2].split()[19]}"
    return ""
