"""What the user asked the launcher for: typed, checked, and never changed.

``command_line.parse`` makes these from the command line; nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from collective.elastic.generations import REQUEUE
from collective.environment.base import MAX_NP, MIN_NP, RANK_TIMEOUT
from collective.environment.seconds import TIMEOUT, TIMEOUT_SECONDS, seconds
from collective.errors import UsageError
from collective.launch.output import OutputStyle, log_variables
from collective.launch.remote_shell import RemoteShell

ANSWER_SECONDS = 30  # for a host to answer before mpirun starts
START_SECONDS = 120  # for all ranks to start under mpirun


@dataclass(frozen=True)
class LaunchOptions:
    """The command line of the launcher: each option under the name that it has there."""

    command: Sequence[str] = ()  # program and arguments of each rank
    num_proc: int | None = None  # None: all slots of the hosts
    # Seconds that hosts and ranks have to answer; None: the default of each.
    start_timeout: int | None = None
    shell: RemoteShell = field(default_factory=RemoteShell)
    style: OutputStyle = field(default_factory=OutputStyle)
    # Variables of the ranks that options stand for.
    variables: Mapping[str, str] = field(default_factory=dict)
    verbose: bool = False  # print what is started and how it ends
    dry_run: bool = False  # only print what would be started
    check_build: bool = False  # only print what this installation can do
    backend: str | None = None  # who sums the gradients of an unedited Keras script

    # Where the ranks run.
    hosts: str = ""  # as -H takes them
    hostfile: str = ""
    # A shell command that prints the hosts there are now.
    host_discovery_script: str = ""
    # Of a host that the script names without slots; of an agent.
    slots_per_host: int | None = None

    # One process on each node runs the launcher, as an agent (collective.launch.agents).
    agent: bool = False
    head: str = ""  # HOST:PORT of node 0
    nodes: int | None = None  # how many; None: as srun or TF_CONFIG say
    node: int | None = None  # the number of this one; None: as those or Kubernetes say
    encrypt: bool = False  # what they say to each other

    # How many ranks the job may lose and gain. It continues while min_np are left; None:
    # it ends with the first one that fails.
    min_np: int | None = None
    # Lost ranks are replaced, up to so many in all; None: they are not.
    max_np: int | None = None
    # Seconds to wait for min_np slots, at the start and later.
    elastic_timeout: int = 600
    # The job ends when its ranks have changed more often; None: never.
    reset_limit: int | None = None
    # Whether the next generation starts only when the one before has ended.
    no_overlap: bool = False
    # Signal at which ranks save a checkpoint, and Slurm starts the job again.
    requeue_on: str = ""
    # Seconds after which a rank for which others wait, and that waits for none, counts
    # as dead; None: half of COLLECTIVE_TIMEOUT.
    rank_timeout: float | None = None
    # Seconds that the place of a lost rank stays empty: at first, and at most, as the
    # time doubles with each rank that fails to join.
    cooldown: tuple[float, float] = (1.0, 64.0)

    # How mpirun is used, where ranks run on several hosts.
    mpirun: str | None = None  # None: that of this environment or of the PATH
    use_mpi: bool = False  # on one host, too
    use_gloo: bool = False  # never mpirun
    nics: Sequence[str] = ()  # carry the traffic; empty for MPI's own choice
    tcp: bool = False  # MPI uses TCP only
    heartbeat: int = 10  # a host silent for so long is given up
    # mpirun's options in place of "do not bind"; then the launcher does not bind.
    binding_args: Sequence[str] = ()
    mpi_args: Sequence[str] = ()  # further options of mpirun

    def seconds(self, variable: str, otherwise: float) -> float:
        """A time that an option or the environment sets; a UsageError if it is none."""
        return seconds(variable, otherwise, self.variables.get(variable, ""))

    @property
    def rank_timeout_seconds(self) -> float:
        """``rank_timeout`` or its default.

        Raises:
            UsageError: If it is not a time, or the whole job would end before.
        """
        most = self.seconds(TIMEOUT, TIMEOUT_SECONDS)
        chosen = self.rank_timeout or self.seconds(RANK_TIMEOUT, most / 2)
        if chosen >= most:
            raise UsageError(
                f"--rank-timeout {chosen:g}: after {most:g} s the whole job ends",
                hint=f"COLLECTIVE_TIMEOUT={2 * chosen:g}, or a shorter --rank-timeout",
            )
        return chosen

    @property
    def end_seconds(self) -> float:
        """How long a rank whose work is over may take to end."""
        return self.seconds(TIMEOUT, TIMEOUT_SECONDS)

    @property
    def rank_variables(self) -> dict[str, str]:
        """All variables that the ranks get for the options."""
        found = {**log_variables(), **self.variables, "PYTHONUNBUFFERED": "1"}
        if self.min_np is not None:
            found[MIN_NP] = str(self.min_np)
            found[RANK_TIMEOUT] = f"{self.rank_timeout_seconds:g}"
        if self.requeue_on:
            found[REQUEUE] = "1"
        if self.max_np is not None:
            found[MAX_NP] = str(self.max_np)
        return found
