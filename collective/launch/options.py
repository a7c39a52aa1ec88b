"""What the user asked the launcher for: typed, checked, and never changed.

``command_line.parse`` makes these from the command line; nothing else reads it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collective.errors import UsageError
from collective.launch.output import OutputStyle
from collective.launch.remote_shell import RemoteShell

ANSWER_SECONDS = 30  # for a host to answer before mpirun starts
ELASTIC_SECONDS = 600  # for enough slots to be there
COOLDOWN_SECONDS = 1.0, 64.0  # before a lost rank is replaced
TIMEOUT_SECONDS = 600  # that ranks wait for each other (COLLECTIVE_TIMEOUT)
HEARTBEAT_SECONDS = 10
INIT_SECONDS = 60  # the same in init (COLLECTIVE_START_TIMEOUT)
START_SECONDS = 120  # for all ranks to start under mpirun


@dataclass(frozen=True)
class ElasticOptions:
    """How many ranks the job may lose and gain.

    Attributes:
        min_np: The job continues while so many ranks are left; None: it ends with the
            first rank that fails.
        max_np: Lost ranks are replaced, up to so many in all; None: they are not.
        discovery_script: A shell command that prints the hosts there are now.
        slots_per_host: Of a host that the script names without slots.
        timeout: Seconds to wait for ``min_np`` slots, at the start and later.
        reset_limit: The job ends when its ranks have changed more often; None: never.
        rank_timeout: Seconds after which a rank for which others wait, and that waits
            for none, counts as dead; None: half of ``COLLECTIVE_TIMEOUT``.
        cooldown: Seconds that the place of a lost rank stays empty: at first, and at
            most, as the time doubles with each rank that fails to join.
    """

    min_np: int | None = None
    max_np: int | None = None
    discovery_script: str = ""
    slots_per_host: int | None = None
    timeout: int = ELASTIC_SECONDS
    reset_limit: int | None = None
    rank_timeout: float | None = None
    cooldown: tuple[float, float] = COOLDOWN_SECONDS


@dataclass(frozen=True)
class MpiOptions:
    """How mpirun is used, where ranks run on several hosts.

    Attributes:
        program: Which mpirun; None for the one of this environment or of the PATH.
        always: Use mpirun on one host, too (``--mpi``).
        never: Never use it (``--gloo``).
        nics: Network interfaces that carry the traffic; empty for MPI's own choice.
        tcp: Whether MPI uses TCP only.
        heartbeat: Seconds after which a host that is silent is given up.
        binding: mpirun's options in place of "do not bind"; the launcher binds then not.
        arguments: Further options of mpirun.
    """

    program: str | None = None
    always: bool = False
    never: bool = False
    nics: Sequence[str] = ()
    tcp: bool = False
    heartbeat: int = HEARTBEAT_SECONDS
    binding: Sequence[str] = ()
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of the launcher.

    Attributes:
        command: Program and arguments of each rank.
        num_proc: Number of ranks; None for all slots of the hosts.
        hosts: As ``-H`` takes them; empty if not given.
        hostfile: Path; empty if not given.
        elastic, mpi, shell, style: See there.
        variables: Environment variables of the ranks that options stand for.
        start_timeout: Seconds that hosts and ranks have to answer; None for the default
            of each.
        verbose: Whether to print what is started and how it ends.
        dry_run: Only print what would be started.
        check_build: Only print what this installation can do.
    """

    command: Sequence[str] = ()
    num_proc: int | None = None
    hosts: str = ""
    hostfile: str = ""
    elastic: ElasticOptions = field(default_factory=ElasticOptions)
    mpi: MpiOptions = field(default_factory=MpiOptions)
    shell: RemoteShell = field(default_factory=RemoteShell)
    style: OutputStyle = field(default_factory=OutputStyle)
    variables: Mapping[str, str] = field(default_factory=dict)
    start_timeout: int | None = None
    verbose: bool = False
    dry_run: bool = False
    check_build: bool = False

    def seconds(self, variable: str, otherwise: float) -> float:
        """A time that an option or the environment sets.

        Raises:
            UsageError: If it is no time.
        """
        text = self.variables.get(variable) or os.environ.get(variable) or otherwise
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            raise UsageError(
                f"{variable}={text} is no time",
                hint=f"give seconds, as in {variable}=90",
            )
        return seconds

    @property
    def rank_timeout(self) -> float:
        """Of an elastic job, in seconds.

        Raises:
            UsageError: If it is no time, or the whole job would end before.
        """
        most = self.seconds("COLLECTIVE_TIMEOUT", TIMEOUT_SECONDS)
        given = self.elastic.rank_timeout
        seconds = given or self.seconds("COLLECTIVE_RANK_TIMEOUT", most / 2)
        if seconds >= most:
            raise UsageError(
                f"--rank-timeout {seconds:g}: after {most:g} s the whole job ends",
                hint=f"COLLECTIVE_TIMEOUT={2 * seconds:g}, or a shorter --rank-timeout",
            )
        return seconds
