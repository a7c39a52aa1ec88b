"""Ranks on this host, as children of this process: no MPI, no ssh."""

from __future__ import annotations

import functools
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence

from collective.elastic import membership_file
from collective.elastic.membership_file import MembershipFile
from collective.environment import Environment
from collective.environment.base import JOINS, MAX_NP, MIN_NP
from collective.launch import cores, horovod_settings, plain_keras
from collective.launch.elastic import ElasticRanks
from collective.launch.job import Supervised
from collective.launch.options import LaunchOptions
from collective.launch.output import print_message
from collective.launch.supervisor import ProcessSpec, Supervisor


class OnThisHost:
    """The job of a command line that names no other host, with messages for beginners."""

    def __init__(self, options: LaunchOptions, size: int):
        self.options, self.size = options, size

    @functools.cached_property
    def ranks(self) -> EndTogether | ElasticRanks:
        """Return the ranks; they share out the cores that this process may use now."""
        return ranks(self.options, self.size)

    def commands(self) -> str:
        """Return the commands of the ranks."""
        return self.ranks.commands()

    def start(self, has_threads: bool = False) -> None:
        """Start the ranks."""
        self.ranks.start(has_threads)

    def watch(self) -> None:
        """Watch the ranks until all have ended."""
        self.ranks.watch()

    def end(self) -> int:
        """End the ranks; report that none has joined the job, if all have succeeded."""
        code = self.ranks.end()
        joined = self.ranks.membership.has_joined
        if not code and not any(map(joined, range(self.size))):
            start = plain_keras.start_of(self.size)
            if text := plain_keras.none_joined(self.options.command, self.size, start):
                print_message(text)
        return code


def ranks(
    options: LaunchOptions,
    size: int,
    variables: Mapping[str, str] | None = None,
    slots: Callable[[], int] | None = None,
) -> EndTogether | ElasticRanks:
    """Return the ranks, not yet started; elastic ones with ``--min-np``.

    Args:
        variables: Added to the environment of the ranks, in addition to the options' own.
        slots: Returns how many ranks there should be later; by default ``size``.
    """
    for name in (MIN_NP, MAX_NP, JOINS, membership_file.VARIABLE):
        os.environ.pop(name, None)  # set by the job that runs this launcher
    common = {
        **options.rank_variables,
        **(variables or {}),
        # The host may be listed under several names: for the ranks it is one host.
        "COLLECTIVE_JOB": os.urandom(16).hex(),
    }
    # The cores are divided among the largest number of ranks.
    most = options.max_np or size
    shares = [[]] * most if options.binding_args else cores.share(most)

    def spec(rank: int, slot: int, joins: bool = False) -> ProcessSpec:
        local_size = most if joins else size
        total = max(rank + 1, local_size)
        place = Environment("collectiverun", rank, total, slot, local_size, 0, 1)
        own = {
            **horovod_settings.place(place),
            "COLLECTIVE_SIZE": str(total),
            "COLLECTIVE_LOCAL_SIZE": str(local_size),
            "COLLECTIVE_RANK": str(rank),
            "COLLECTIVE_LOCAL_RANK": str(slot),
            **({JOINS: "1"} if joins else {}),
        }
        return ProcessSpec(
            rank, options.command, {**common, **own}, shares[slot], rank == 0
        )

    if options.verbose:
        bound = "each bound to its own cores"
        how = bound if shares[0] else "not bound: the kernel places them"
        print_message(
            f"{size} ranks on this host, {how}: {shlex.join(options.command)}"
        )
    specs = [spec(rank, rank) for rank in range(size)]
    membership = MembershipFile(size)
    if options.min_np is None:
        return EndTogether(specs, options, membership)
    wanted = None
    if options.max_np is not None:
        wanted = slots or (lambda: size)
    return ElasticRanks(specs, options, membership, spec, wanted)


class EndTogether(Supervised):
    """The ranks of a job that needs all of them: if one fails, the others are ended.

    Args:
        membership: The file in which ranks note that they wait for each other or have joined.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        options: LaunchOptions,
        membership: MembershipFile,
    ):
        self.membership = membership
        self.absent = list[int]()  # ranks that succeeded and never joined the job
        self.supervisor = Supervisor(
            specs, len(specs), options, self, membership=membership
        )

    def on_exit(self, rank: int, code: int) -> None:
        """End the other ranks if one fails, or ends before it has joined the job."""
        job = self.supervisor
        if job.ending:
            return
        if code == 0:
            if not self.membership.has_joined(rank):
                self.absent.append(rank)
            return
        consequence = "; ending the other ranks" if job.processes else ""
        if code < 0 and job.processes:
            consequence += (
                "\nHINT: with --min-np N the job continues without ranks that die "
                "(backends native and mpi); a checkpoint lets a training continue "
                "where it was (docs/how-to/checkpoints.md)"
            )
        job.note_failure(rank, code, consequence)
        job.end(signal.SIGTERM)

    def look(self) -> None:
        """End the job when a rank waits in init for one that has already exited."""
        job = self.supervisor
        if not self.absent or job.ending:
            return
        read, joining = self.membership.read, membership_file.JOINING
        running = [rank for rank, _ in job.processes.values()]
        waiting = next((rank for rank in running if read(rank) == joining), None)
        if waiting is None:
            return
        absent = self.absent[0]
        how = "with exit code 0 before it called collective.init()"
        print_message(
            f"rank {absent} ended {how}, where rank {waiting} waits for it; ending the "
            "other ranks\nHINT: every rank must call collective.init(); see what rank "
            f"{absent} printed, or start fewer ranks"
        )
        job.exit_code, job.failed = 1, (absent, how)
        job.end(signal.SIGTERM)

    def report(self) -> None:
        """Report which rank failed."""
        self.supervisor.report_failure()
