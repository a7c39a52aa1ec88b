"""Ranks on several hosts: composes mpirun's line, prints it, runs it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from collective.environment.base import MAX_NP, MIN_NP, TABLE
from collective.hosts import Rank, slurm
from collective.launch import mpi, reachable
from collective.launch.mpirun import Mpirun
from collective.launch.output import Style, tell

START_SECONDS = 120


def run(
    ranks: Sequence[Rank],
    options: argparse.Namespace,
    style: Style,
    variables: Mapping[str, str],
    begun: Callable[[Mpirun], None] | None = None,
) -> int:
    """Runs the ranks by mpirun, or with ``--dry-run`` only prints its line.

    Args:
        ranks: Those to start.
        options: The command line.
        style: How output is shown.
        variables: Added to the ranks' environment.
        begun: Called with the job.

    Returns:
        The exit code of the job.

    Raises:
        UsageError: If there is no mpirun, or it cannot do what is wanted.
        CollectiveError: If a host does not answer, or has other versions.
    """
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[rank.host.login] = rank.local_size
    hosts = [
        dataclasses.replace(rank.host, slots=counts[rank.host.login], max_slots=None)
        for rank in ranks
        if rank.local_rank == 0
    ]
    slots = [host.slots or 0 for host in hosts]
    variables = {**variables, TABLE: slurm.tasks(slots)}
    if options.min_np is not None:
        variables[MIN_NP] = str(options.min_np)
    if options.max_np is not None:
        variables[MAX_NP] = str(options.max_np)
    wanted = mpi.Wanted(
        hosts,
        [*_watched(options, style), *_found(options.command)],
        exported=[n for n in mpi.exported(os.environ) if n not in variables],
        variables=variables,
        nics=options.nics,
        remote_shell=options.remote_shell,
        ssh=reachable.ssh_options(options),
        tcp=options.tcp_flag,
        survive=options.min_np is not None,
        binding=shlex.split(options.binding_args),
        more=shlex.split(options.mpi_args),
    )
    found = mpi.find(options.mpirun)
    words = mpi.compose(found, wanted)
    if options.dry_run:
        print(mpi.shell(words))
        return 0
    tell(mpi.shell(words))
    cut_off = reachable.check(hosts, options, found.program)
    with tempfile.TemporaryDirectory(prefix="collective-") as folder:
        file = Path(folder, "hosts")
        for word in words:
            if isinstance(word, mpi.Hostfile):
                file.write_text(word)
        words = [str(file) if isinstance(w, mpi.Hostfile) else w for w in words]
        seconds = options.start_timeout or START_SECONDS
        job = Mpirun(words, ranks, seconds, cut_off, options.verbose, options.min_np)
        if begun is not None:
            begun(job)
        return job.run()


def _found(command: Sequence[str]) -> list[str]:
    """The command with its program's path: Open MPI puts itself first on the PATH."""
    return [shutil.which(command[0]) or command[0], *command[1:]]


def _watched(options: argparse.Namespace, style: Style) -> list[str]:
    """The start of each rank's command: our own watcher on its host."""
    words = [sys.executable, "-m", "collective.launch.rank", "--announce"]
    if not style.prefix:
        words.append("--no-prefix")
    if style.timestamp:
        words.append("--timestamp")
    if style.directory is not None:
        words += ["--directory", str(style.directory)]
    if options.binding_args:
        words.append("--no-binding")
    if options.verbose:
        words.append("--verbose")
    return [*words, "--"]
