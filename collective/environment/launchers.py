"""Which variables each launcher sets, and how they are read."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import ClassVar

from collective.environment.base import (
    JOINS,
    RANKS_PER_HOST,
    SETS_HOROVOD_RANK,
    Environment,
)
from collective.errors import UsageError
from collective.hosts import slurm


class Launcher:
    """A kind of launcher.

    Args:
        variables: The environment.

    Attributes:
        name: As of ``Environment.launcher``.
        needs: Variables that it always sets, those of rank and size first.
        local: Variables of local rank and size.
        across: Variables of cross rank and size; empty where it has none.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    local: ClassVar[tuple[str, str]]
    across: ClassVar[tuple[str, ...]] = ()

    def __init__(self, variables: Mapping[str, str]):
        self.variables = variables

    def started_us(self) -> bool:
        """Whether it started this process."""
        return all(name in self.variables for name in self.needs)

    def rank(self) -> int:
        """Number of this process in the job."""
        return self.number(self.needs[0])

    def size(self) -> int:
        """Number of processes in the job."""
        return self.number(self.needs[1])

    def local_size(self) -> int:
        """Processes on this host; all of them if the launcher sets no number."""
        return self.number(self.local[1], self.size())

    def local_rank(self) -> int:
        """Number of this process on its host."""
        return self.number(self.local[0], self.rank() % max(1, self.local_size()))

    def cross(self) -> tuple[int, int]:
        """Number of this host and of the hosts; -1 if unknown.

        MPI's launchers do not set it. Ours, when it starts one of them, sets how many
        ranks each host has; ranks fill one host after the other. The numbers may not
        fit, as in a job that a rank of another job starts.
        """
        if self.across:
            known = all(name in self.variables for name in self.across)
            rank, size = map(self.number, self.across) if known else (-1, -1)
            return rank, size
        try:
            counts = slurm.counts(self.variables.get(RANKS_PER_HOST, ""))
        except ValueError:
            return -1, -1
        starts = list(itertools.accumulate(counts, initial=0))
        local, first = self.local_rank(), self.rank() - self.local_rank()
        if starts[-1] != self.size() or first not in starts:
            return -1, -1
        host = starts.index(first)
        return (
            _cross(counts, host, local)
            if counts[host] == self.local_size()
            else (-1, -1)
        )

    def environment(self) -> Environment:
        """All ranks and sizes.

        Raises:
            UsageError: If a variable is not a number, or out of range.
        """
        rank, size = self.rank(), self.size()
        local_rank, local_size = self.local_rank(), self.local_size()
        if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
            raise UsageError(
                f"the environment ({self.needs[0]}, ...) has rank {rank} of {size}, and "
                f"{local_rank} of {local_size} on this host, which is impossible",
                hint=f"unset {' '.join(self.needs)}, or start the job by {self.name}",
            )
        return Environment(self.name, rank, size, local_rank, local_size, *self.cross())

    def number(self, name: str, default: int | None = None) -> int:
        """A variable's number.

        Raises:
            UsageError: If it is not a number.
        """
        text = self.variables.get(name)
        if not text and default is not None:
            return default
        if not (text and text.isascii() and text.isdigit() and len(text) < 10):
            raise UsageError(
                f"{name}={text and text[:40]!r} in the environment is not a number",
                hint=f"unset {' '.join(self.needs)}, or start the job by {self.name}",
            )
        return int(text)


def _cross(counts: list[int], host: int, local: int) -> tuple[int, int]:
    """Of the hosts that have so many ranks each: those with a rank of this local rank."""
    return sum(n > local for n in counts[:host]), sum(n > local for n in counts)


class CollectiveRun(Launcher):
    """Our own launcher, on one host. Across hosts it starts mpirun."""

    name = "collectiverun"
    needs = ("COLLECTIVE_RANK", "COLLECTIVE_SIZE")
    local = ("COLLECTIVE_LOCAL_RANK", "COLLECTIVE_LOCAL_SIZE")

    def environment(self) -> Environment:
        """``COLLECTIVE_JOINS`` marks a process that joins later."""
        joining = JOINS in self.variables
        return dataclasses.replace(super().environment(), joining=joining)


class HorovodGloo(Launcher):
    """horovodrun without MPI. With mpirun it sets no variable of its own."""

    name = "horovodrun"
    needs = ("HOROVOD_RANK", "HOROVOD_SIZE")
    local = ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    across = ("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")

    def started_us(self) -> bool:
        """Not where the variables are those that collectiverun sets."""
        return super().started_us() and SETS_HOROVOD_RANK not in self.variables


class OpenMPI(Launcher):
    """mpirun of Open MPI 4 and 5."""

    name = "mpirun"
    needs: ClassVar[tuple[str, ...]] = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


class Hydra(Launcher):
    """mpirun of MPICH and of Intel MPI."""

    name = "mpirun"
    needs: ClassVar[tuple[str, ...]] = ("PMI_RANK", "PMI_SIZE")
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    def started_us(self) -> bool:
        """Not if ``srun --mpi=pmi2`` set the same: its own variables say more."""
        env = self.variables
        by_srun = (
            "MPI_LOCALRANKID" not in env
            and "SLURM_STEP_ID" in env
            and env.get("PMI_RANK") == env.get("SLURM_PROCID")
        )
        return super().started_us() and not by_srun


class HorovodOpenMPI(OpenMPI):
    """horovodrun that has started Open MPI's mpirun, where this project started it."""

    name = "horovodrun"
    needs = (*OpenMPI.needs, "COLLECTIVE_HOROVODRUN")


class HorovodHydra(Hydra):
    """horovodrun that has started the mpirun of MPICH or Intel MPI."""

    name = "horovodrun"
    needs = (*Hydra.needs, "COLLECTIVE_HOROVODRUN")


class TorchRun(Launcher):
    """torchrun. CI systems may set RANK too, so MASTER_ADDR must be set as well.

    A ``GROUP`` is what one agent started.
    """

    name = "torchrun"
    needs = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    across = ("GROUP_RANK", "GROUP_WORLD_SIZE")


class Slurm(Launcher):
    """srun, with or without MPI. Without ``SLURM_STEP_ID`` it is a batch script's."""

    name = "srun"
    needs = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")
    local = ("SLURM_LOCALID", "")

    def size(self) -> int:
        """A step may be smaller than its allocation."""
        return self.number("SLURM_STEP_NUM_TASKS", super().size())

    def local_size(self) -> int:
        """This node's number in ``SLURM_STEP_TASKS_PER_NODE`` (``2(x3),1``)."""
        counts, node = self._counts(), self.number("SLURM_NODEID", 0)
        return counts[node] if node < len(counts) else self.size()

    def cross(self) -> tuple[int, int]:
        """From ``SLURM_NODEID`` and the number of tasks on each node."""
        counts = self._counts()
        if "SLURM_NODEID" not in self.variables or not counts:
            return -1, -1
        return _cross(counts, self.number("SLURM_NODEID"), self.local_rank())

    def _counts(self) -> list[int]:
        try:
            return slurm.counts(self.variables["SLURM_STEP_TASKS_PER_NODE"])
        except (KeyError, ValueError):
            return []


class PMIx(Launcher):
    """Any launcher that sets only PMIx' variables, as PRRTE's ``prterun``.

    PMIx has a library call for the size, not a variable: the user has to set it.
    """

    name = "PMIx"
    needs = ("PMIX_RANK", "PMIX_NAMESPACE")
    local = CollectiveRun.local

    def size(self) -> int:
        """``COLLECTIVE_SIZE``; without it this may be one process or one of many."""
        if "COLLECTIVE_SIZE" not in self.variables:
            raise UsageError(
                f"a PMIx launcher started rank {self.rank()} without the number of "
                "ranks in the environment",
                hint="start the job by mpirun or srun, or: export COLLECTIVE_SIZE=4",
            )
        return self.number("COLLECTIVE_SIZE")


class TFConfig(Launcher):
    """The cluster and this process' task in it, as JSON.

    Ranks are the chief, if any, and then the workers in their order. Those with the same
    host in their address are local.
    """

    name = "TF_CONFIG"
    needs = ("TF_CONFIG",)

    def started_us(self) -> bool:
        """Whether it names several workers; one worker needs no job."""
        return bool(self.variables.get("TF_CONFIG")) and self.size() > 1

    def rank(self) -> int:
        """From ``task``."""
        config = self._config()
        try:
            kind, index = config["task"]["type"], int(config["task"]["index"])
            chiefs = len(config["cluster"].get("chief", []))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise self._error("it has no task with type and index") from None
        if kind not in ("chief", "worker"):
            raise self._error(f"a task of type {kind!r} does not train")
        if not 0 <= index < (chiefs if kind == "chief" else self.size() - chiefs):
            raise self._error(f"its cluster has no {kind} {index}")
        return index if kind == "chief" else index + chiefs

    def size(self) -> int:
        """Chief and workers."""
        return len(self._hosts())

    def local_rank(self) -> int:
        """Among those on the same host."""
        hosts, rank = self._hosts(), self.rank()
        return hosts[:rank].count(hosts[rank])

    def local_size(self) -> int:
        """Those on the same host."""
        hosts = self._hosts()
        return hosts.count(hosts[self.rank()])

    def _hosts(self) -> list[str]:
        cluster = self._config().get("cluster") or {}
        try:
            addresses = [*cluster.get("chief", []), *cluster.get("worker", [])]
            return [str.rpartition(address, ":")[0] for address in addresses]
        except (AttributeError, TypeError):
            what = "its cluster is not a table of lists of addresses"
            raise self._error(what) from None

    def _config(self) -> dict:
        try:
            config = json.loads(self.variables["TF_CONFIG"])
        except (ValueError, RecursionError) as error:
            raise self._error(f"it is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise self._error("it is not a JSON object")
        return config

    def _error(self, what: str) -> UsageError:
        return UsageError(
            f"TF_CONFIG in the environment cannot be used: {what}",
            hint='export TF_CONFIG=\'{"cluster": {"worker": ["a:2222", "b:2222"]}, '
            '"task": {"type": "worker", "index": 0}}\', or unset TF_CONFIG',
        )


# The first whose variables are set wins. Open MPI sets PMIX_RANK too, and every job in a
# Slurm allocation has SLURM_*: so inner launchers come before outer ones.
LAUNCHERS: tuple[type[Launcher], ...] = (
    CollectiveRun,
    HorovodGloo,
    HorovodOpenMPI,
    HorovodHydra,
    OpenMPI,
    Hydra,
    TorchRun,
    Slurm,
    PMIx,
    TFConfig,
)
