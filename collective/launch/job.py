"""What every kind of job can do, and the one way to run it.

``choosing.choose`` returns the job that the command line asks for. ``restarting`` runs one
job after another, as the generations of a job whose hosts change.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from collective.launch.output import settled
from collective.launch.supervisor import Supervisor


class Job(Protocol):
    """What the launcher does for one command line."""

    def start(self, has_threads: bool = False) -> None:
        """Check what can be checked before, and start the processes.

        Args:
            has_threads: Whether this process has threads; see ``processes.start``.

        Raises:
            CollectiveError: If the job cannot be started.
        """

    def watch(self) -> None:
        """Watch the processes until all have ended."""

    def end(self) -> int:
        """End what is left of the job, report a failure, and return the exit code."""


class JobOfRanks(Job, Protocol):
    """A job that starts ranks."""

    def commands(self) -> str:
        """Return the commands that ``start`` would start at once."""


class Generation(JobOfRanks, Protocol):
    """A job that another one can follow, on other hosts, with the state of its training."""

    supervisor: Supervisor
    uses_mpi: bool
    lost_host: bool  # it has ended because a host is lost

    def restart(self) -> None:
        """Ask the ranks to end for the next generation; from any thread.

        The caller repeats it until they have ended, because a rank that has not joined the
        job yet may ignore it.
        """

    @property
    def training(self) -> bool:
        """Return whether the ranks may end for the next generation."""

    @property
    def has_handed_over(self) -> bool:
        """Return whether no rank trains any more, and the next generation may begin."""

    @property
    def finishing(self) -> bool:
        """Return whether the job will end by itself, so that none should follow."""

    @property
    def lost_ranks(self) -> Collection[int]:
        """Return the ranks that have ended early and are not replaced in this generation."""

    @property
    def still_hosts(self) -> Collection[str]:
        """Return the names of hosts that were given up because they stand still."""


class Supervised:
    """A job whose processes belong to one ``Supervisor``."""

    supervisor: Supervisor

    def commands(self) -> str:
        """Return the commands of the processes that are started at once."""
        return self.supervisor.commands()

    def start(self, has_threads: bool = False) -> None:
        """Start the processes; see ``Job.start``."""
        self.supervisor.start(has_threads)

    def watch(self) -> None:
        """Watch the processes until all have ended."""
        self.supervisor.watch()

    def end(self) -> int:
        """Kill processes that still run, report a failure, and return the exit code."""
        return self.supervisor.finish()


def run(job: Job) -> int:
    """Run a job to its end, and return its exit code.

    Raises:
        CollectiveError: If it cannot be started.
    """
    job.start()
    try:
        job.watch()
    finally:
        code = job.end()
    return settled(code)
