"""What every way to start ranks has in common.

``SingleHost`` and ``MultiHost`` make a supervisor from the places of the ranks; it starts
them and waits. ``RestartingLauncher`` does so once for each generation of the job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from collective.hosts import Rank
from collective.launch.options import LaunchOptions
from collective.launch.supervisor import Supervisor


class Launcher(Protocol):
    """Runs a job."""

    def run(self, ranks: Sequence[Rank]) -> int:
        """Starts the ranks and waits for them.

        Returns:
            The exit code of the job.

        Raises:
            CollectiveError: If it cannot be started.
        """


class OneGeneration(ABC):
    """A launcher that starts the ranks once.

    Args:
        options: The command line.
        variables: Added to the environment of the ranks, beside those of the options.
    """

    def __init__(
        self, options: LaunchOptions, variables: Mapping[str, str] | None = None
    ):
        self.options = options
        self.variables = {
            **options.variables,
            **(variables or {}),
            "PYTHONUNBUFFERED": "1",
        }

    @abstractmethod
    def dry_run(self, ranks: Sequence[Rank]) -> str:
        """What would be started, as shell commands."""

    @abstractmethod
    def supervisor(self, ranks: Sequence[Rank]) -> Supervisor:
        """The job, ready to be run.

        Raises:
            CollectiveError: If it cannot be started.
        """

    def run(self, ranks: Sequence[Rank]) -> int:
        """As of ``Launcher``; with ``--dry-run`` only prints."""
        if self.options.dry_run:
            print(self.dry_run(ranks))
            return 0
        return self.supervisor(ranks).run()
