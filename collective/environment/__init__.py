"""Rank and size of this process, read from the environment that its launcher set.

Nothing here starts MPI or imports TensorFlow: a few variables are enough to distinguish
mpirun, srun, horovodrun, torchrun and our own launcher.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from collective.environment import launchers, lone, unknown
from collective.environment.base import Environment as Environment
from collective.environment.launcher import Launcher as Launcher
from collective.environment.launchers import HorovodGloo as HorovodGloo
from collective.log import log


def launcher(variables: Mapping[str, str] | None = None) -> Launcher | None:
    """Return the launcher that started this process, or None."""
    return launchers.find_launcher(os.environ if variables is None else variables)


def detect(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment.

    Returns:
        Rank and size of this process; ``Environment()`` without a launcher.

    Raises:
        UsageError: If a variable is not a number, or out of range.
    """
    found = launcher(variables)
    return found.environment() if found else Environment()


def detect_rank(variables: Mapping[str, str] | None = None) -> Environment:
    """Detect the environment of a process that begins to train.

    Raises:
        UsageError: Also if it has no rank, and is one of several processes.
    """
    env = os.environ if variables is None else variables
    found = detect(env)
    if not found.launched:
        lone.check_alone(env)
    if variables is None:
        lone.check_spawned()
        _warn(found.rank)
    return found


@functools.cache  # once
def _warn(rank: int) -> None:
    if rank == 0 and "COLLECTIVE_BOARD" not in os.environ:  # else our launcher did
        for warning in unknown.warnings(os.environ):
            log.warning(warning)


def addresses(variables: Mapping[str, str] | None = None) -> list[str]:
    """Return ``host:port`` for a server of each rank, as TF_CONFIG or srun announce it.

    Returns an empty list if they do not.
    """
    found = launcher(variables)
    return found.addresses() if found else []


def cores_per_process(environment: Environment) -> int:
    """Return this process' share of the host's cores, at least 1.

    A launcher that bound the process to some cores has divided them already. Otherwise
    they are divided evenly among the processes of this host.
    """
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if mine < all_cores:
        return mine
    return max(1, mine // environment.local_size)
