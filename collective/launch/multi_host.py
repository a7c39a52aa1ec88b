"""Ranks on several hosts: composes the command of mpirun, prints it, runs it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence

from collective.environment.base import MAX_NP, MIN_NP, RANK_TIMEOUT, RANKS_PER_HOST
from collective.hosts import Host, Rank, slurm
from collective.launch import mpi, reachability
from collective.launch.launcher import OneGeneration
from collective.launch.mpirun import MpirunSupervisor
from collective.launch.options import ANSWER_SECONDS, START_SECONDS
from collective.launch.output import print_message


class MultiHost(OneGeneration):
    """Starts the ranks by mpirun, each beneath ``collective.launch.rank`` on its host."""

    def dry_run(self, ranks: Sequence[Rank]) -> str:
        """The command of mpirun."""
        return mpi.shell_line(self._command(_hosts_of(ranks), mpi.find(self._program)))

    def supervisor(self, ranks: Sequence[Rank]) -> MpirunSupervisor:
        """Checks the hosts first.

        Raises:
            UsageError: If there is no mpirun, or it cannot start such a job.
            CollectiveError: If a host does not answer, or has other versions.
        """
        options, hosts = self.options, _hosts_of(ranks)
        found = mpi.find(self._program)
        words = self._command(hosts, found)
        print_message(mpi.shell_line(words))
        cut_off = reachability.check(
            hosts,
            options.shell,
            options.mpi.nics,
            found.program,
            options.start_timeout or ANSWER_SECONDS,
        )
        return MpirunSupervisor(
            words,
            ranks,
            start_seconds=options.start_timeout or START_SECONDS,
            cut_off=cut_off,
            verbose=options.verbose,
            min_np=options.elastic.min_np,
        )

    @property
    def _program(self) -> str | None:
        return self.options.mpi.program

    def _command(self, hosts: Sequence[Host], found: mpi.MPI) -> list[str]:
        options = self.options
        variables = {
            **self.variables,
            RANKS_PER_HOST: slurm.tasks([host.slots or 0 for host in hosts]),
        }
        if options.elastic.min_np is not None:
            variables[MIN_NP] = str(options.elastic.min_np)
            variables[RANK_TIMEOUT] = f"{options.rank_timeout:g}"
        if options.elastic.max_np is not None:
            variables[MAX_NP] = str(options.elastic.max_np)
        job = mpi.MpiJob(
            hosts,
            [*self._watcher(), *_with_path(options.command)],
            exported=[n for n in mpi.exported(os.environ) if n not in variables],
            variables=variables,
            options=options.mpi,
            shell=options.shell,
            elastic=options.elastic.min_np is not None,
        )
        return mpi.compose(found, job)

    def _watcher(self) -> list[str]:
        """The start of each rank's command: our own supervisor on its host."""
        style = self.options.style
        words = [sys.executable, "-m", "collective.launch.rank"]
        if not style.prefix:
            words.append("--no-prefix")
        if style.plain_stdout:
            words.append("--plain-stdout")
        if style.timestamp:
            words.append("--timestamp")
        if style.directory is not None:
            words += ["--directory", str(style.directory)]
        if self.options.mpi.binding:
            words.append("--no-binding")
        if self.options.verbose:
            words.append("--verbose")
        return [*words, "--"]


def _hosts_of(ranks: Sequence[Rank]) -> list[Host]:
    """The hosts, each once, with its number of ranks as slots."""
    counts = {rank.host.login: rank.local_size for rank in ranks}
    return [
        dataclasses.replace(rank.host, slots=counts[rank.host.login], max_slots=None)
        for rank in ranks
        if rank.local_rank == 0
    ]


def _with_path(command: Sequence[str]) -> list[str]:
    """The command with its program's path: Open MPI puts itself first on the PATH."""
    return [shutil.which(command[0]) or command[0], *command[1:]]
