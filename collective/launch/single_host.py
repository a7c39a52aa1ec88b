"""Ranks on this host: no MPI, no ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence

from collective.elastic.membership_file import VARIABLE as MEMBERSHIP_FILE
from collective.elastic.membership_file import MembershipFile
from collective.environment import Environment
from collective.environment.base import JOINS, MAX_NP, MIN_NP, RANK_TIMEOUT
from collective.hosts import Rank
from collective.launch import cores, horovod_settings
from collective.launch.elastic import ElasticSupervisor, Growth
from collective.launch.launcher import OneGeneration
from collective.launch.options import INIT_SECONDS, LaunchOptions
from collective.launch.output import print_message
from collective.launch.supervisor import ProcessSpec, Supervisor


class SingleHost(OneGeneration):
    """Starts the ranks as children of this process.

    Args:
        options, variables: As of ``OneGeneration``.
        slots: Returns how many ranks there should be, while the job runs; by default
            as many as at the start.
    """

    def __init__(
        self,
        options: LaunchOptions,
        variables: Mapping[str, str] | None = None,
        slots: Callable[[], int] | None = None,
    ):
        super().__init__(options, variables)
        self.slots = slots
        self._shares: dict[int, list[list[int]]] = {}  # by number of slots
        # The host may be listed under several names: it is one host for the ranks.
        self.variables["COLLECTIVE_JOB"] = os.urandom(16).hex()
        elastic = options.elastic
        if elastic.min_np is not None:
            self.variables[MIN_NP] = str(elastic.min_np)
            self.variables[RANK_TIMEOUT] = f"{options.rank_timeout:g}"
        if elastic.max_np is not None:
            self.variables[MAX_NP] = str(elastic.max_np)

    def dry_run(self, ranks: Sequence[Rank]) -> str:
        """A line for each rank: its variables and the command."""
        lines = []
        for spec in self._specs(len(ranks)):
            assigned = " ".join(
                f"{name}={shlex.quote(value)}"
                for name, value in sorted(spec.variables.items())
            )
            lines.append(f"[{spec.rank}] {assigned} {shlex.join(spec.command)}")
        return "\n".join(lines)

    def supervisor(self, ranks: Sequence[Rank]) -> Supervisor:
        """An elastic one with ``--min-np``."""
        options, size = self.options, len(ranks)
        for name in (MIN_NP, MAX_NP, JOINS, MEMBERSHIP_FILE):
            os.environ.pop(name, None)  # of a job within which this one is started
        if options.verbose:
            how = (
                "each bound to its own cores"
                if self._cores(size, 0)
                else "not bound: the kernel places them"
            )
            print_message(
                f"{size} ranks on this host, {how}: {shlex.join(options.command)}"
            )
        style, verbose, elastic = options.style, options.verbose, options.elastic
        membership = MembershipFile(size)
        self.variables[MEMBERSHIP_FILE] = membership.path
        if elastic.min_np is None:
            return Supervisor(
                self._specs(size), size, style, verbose=verbose, membership=membership
            )
        growth = None
        if elastic.max_np is not None:
            growth = Growth(self.slots or (lambda: size), elastic.max_np, self._late)
        return ElasticSupervisor(
            self._specs(size),
            size,
            style,
            verbose=verbose,
            min_np=elastic.min_np,
            membership=membership,
            growth=growth,
            rank_timeout=options.rank_timeout,
            start_timeout=options.seconds("COLLECTIVE_START_TIMEOUT", INIT_SECONDS),
            cooldown=elastic.cooldown,
            reset_limit=elastic.reset_limit,
        )

    def _specs(self, size: int) -> list[ProcessSpec]:
        return [self._spec(rank, rank, size, size) for rank in range(size)]

    def _late(self, rank: int, slot: int) -> ProcessSpec:
        """A rank that joins the running job, in a free slot."""
        local_size = self.options.elastic.max_np or 1
        size = max(rank + 1, local_size)
        return self._spec(rank, slot, size, local_size, **{JOINS: "1"})

    def _spec(
        self, rank: int, slot: int, size: int, local_size: int, **more: str
    ) -> ProcessSpec:
        variables = {
            "COLLECTIVE_SIZE": str(size),
            "COLLECTIVE_LOCAL_SIZE": str(local_size),
            "COLLECTIVE_RANK": str(rank),
            "COLLECTIVE_LOCAL_RANK": str(slot),
        }
        place = Environment("collectiverun", rank, size, slot, local_size, 0, 1)
        return ProcessSpec(
            rank,
            self.options.command,
            {**self.variables, **horovod_settings.place(place), **variables, **more},
            self._cores(local_size, slot),
            takes_input=rank == 0,
        )

    def _cores(self, local_size: int, slot: int) -> list[int]:
        """The cores of a slot: shared out for as many ranks as there may ever be."""
        if self.options.mpi.binding:
            return []
        slots = self.options.elastic.max_np or local_size
        if slots not in self._shares:
            self._shares[slots] = cores.share(slots)
        return self._shares[slots][slot]
