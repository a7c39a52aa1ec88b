"""The options of the launcher; each is declared here, once, and acts where its name is read.

``command_line.parse`` makes ``LaunchOptions`` from the command line; nothing else reads it.
horovodrun's options that only set a variable of the ranks are in ``horovod_settings``.
"""

# ruff: noqa: RUF009 -- _option is dataclasses.field with what argparse needs
from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from collective.environment.base import MAX_NP, MIN_NP, RANK_TIMEOUT
from collective.environment.seconds import TIMEOUT, TIMEOUT_SECONDS, seconds
from collective.errors import UsageError
from collective.fit_options import Setting
from collective.launch.output import OutputStyle, log_variables
from collective.launch.remote_shell import RemoteShell

EXAMPLE = "collectiverun -np 2 python train.py"
ANSWER_SECONDS = 30  # limit for a host's answer before mpirun starts
START_SECONDS = 120  # limit for the start of all ranks under mpirun
# Options that are refused by name: their meaning, and the alternative.
_REFUSED = {
    "--jsrun": ("LSF's jsrun is not supported; within an allocation: -H or --hostfile",
        EXAMPLE),
    "--encrypt": ("agents encrypt nothing, as MPI does not",
        "an encrypted network, such as WireGuard, for both"),
    "--requeue-on": ("the script of the Slurm job requeues it (docs/how-to/slurm.md)",
        "trap 'scontrol requeue $SLURM_JOB_ID' USR1"),
}  # fmt: skip
# Options that the program which runs an unedited script has, too (collective.distribute).
OF_A_SCRIPT = ("backend", "output", "loops", "explain", "resume", "set", "dry_run")
# Options that the supervisor of each rank gets, too (collective.launch.rank).
OF_A_RANK = (
    *("verbose", "keras", "output", "binding_args"),
    *("output_filename", "timestamp", "no_prefix"),
)


def _option(
    *names: str,
    default: Any = None,
    least: int | None = None,
    unit: str = "",
    hint: str = "",
    group: str = "",
    excludes: str = "",
    **argument: Any,
) -> Any:
    """Make a field of ``LaunchOptions`` that is an option of the command line.

    Args:
        least: The smallest value; an error names the value's ``unit`` and a ``hint``.
        group: The title under which ``--help`` shows it.
        excludes: Options that exclude each other have the same word here.
        **argument: Arguments of ``argparse``. An option whose default is False is a switch.
    """
    if default is False:
        argument["action"] = "store_true"
    known = {"names": names, "argument": argument, "least": least, "unit": unit}
    known |= {"hint": hint, "group": group, "excludes": excludes}
    if default == []:
        return field(default_factory=list, metadata=known)
    return field(default=default, metadata=known)


def _switch(*names: str, help: str, **known: Any) -> Any:
    return _option(*names, default=False, help=help, **known)


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option}={text}: {error}", hint=f'{option}="--map-by node"'
        ) from None


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


class _Read(argparse.Action):
    """Read the word of an option by ``const``, whose UsageError argparse does not see.

    argparse replaces a ValueError of ``type``, which a UsageError is, by words of its own.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        parsed: argparse.Namespace,
        word: Any,
        option: str | None = None,
    ) -> None:
        value = self.const(word)
        if isinstance(self.default, list):  # the option may be given several times
            value = [*getattr(parsed, self.dest), value]
        setattr(parsed, self.dest, value)


_KERAS = "an unedited Keras script"
_AGENTS = "agents: one process on each node, no ssh"
SEVERAL = "several hosts"
_hosts = functools.partial(_option, default="", group="hosts", excludes="-H")
_count = functools.partial(_option, type=int, metavar="N", least=1)
_time = functools.partial(_option, type=int, metavar="SECONDS", least=1)


class _Refuse(argparse.Action):
    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        (name,) = self.option_strings
        why, hint = _REFUSED[name]
        raise UsageError(f"{name}: {why}", hint=hint)


@dataclass(frozen=True)
class LaunchOptions:
    """The user's request to the launcher: typed, checked, and never changed."""

    # fmt: off

    command: Sequence[str] = ()  # program and arguments of each rank
    # How a host is reached, from remote_shell's options.
    shell: RemoteShell = field(default_factory=RemoteShell)
    # Variables of the ranks, set by options.
    variables: Mapping[str, str] = field(default_factory=dict)
    appends: bool = False  # to files that earlier generations have written
    typed: Sequence[str] = ()  # the options as typed, without the command

    # None: all slots of the hosts.
    num_proc: int | None = _count("-np", "--num-proc", unit=" rank is needed", hint=EXAMPLE,
        help="number of ranks; default: all slots of -H or --hostfile")
    # None: the job ends with the first rank that fails.
    min_np: int | None = _count("--min-np", "--min-num-proc",
        help="continue without ranks that die, while N are left (docs/how-to/elastic.md)")
    max_np: int | None = _count("--max-np", "--max-num-proc",
        help="replace ranks that are lost, up to N in all")
    check_build: bool = _switch("-cb", "--check-build",
        help="show what this installation can do, as horovodrun does")
    verbose: bool = _switch("--verbose", help="print what is started and how it ends")
    dry_run: bool = _switch("--dry-run", help="only print what would be started; with --keras: run the script up to its first\n"
        "training step, and say what that would hold in memory and send")
    config_file: str = _option("--config-file", metavar="FILE", default="",
        help="YAML with horovodrun's settings")
    elastic_timeout: int = _time("--elastic-timeout", default=600,
        help="for --min-np slots to be there (%(default)s)")
    reset_limit: int | None = _count("--reset-limit",
        help="end an elastic job whose ranks have changed more than N times")
    # None: half of COLLECTIVE_TIMEOUT; see rank_timeout_seconds.
    rank_timeout: float | None = _option("--rank-timeout", type=float, metavar="SECONDS",
        least=1, help="with --min-np, a rank for which others wait so long counts as dead "
        "(half of COLLECTIVE_TIMEOUT: 300)")
    no_overlap: bool = _switch("--no-overlap",
        help="when hosts change, end the ranks before others start: needs less memory")
    # The time doubles with each rank that fails to join.
    cooldown: Sequence[float] = _option("--blacklist-cooldown-range", type=int, nargs=2,
        metavar=("MIN", "MAX"), default=(1.0, 64.0),
        help="seconds before a lost rank is replaced: at first, and at most (1 64)")

    keras: bool = _switch("--keras", group=_KERAS,
        help="the command is script.py: its fit, evaluate and predict run on all ranks")
    backend: str | None = _option("--backend", metavar="NAME", group=_KERAS,
        help="who sums the gradients (default: auto)")
    loops: bool = _switch("--loops", group=_KERAS,
        help="cut the batches of its own training loops, too")
    explain: bool = _switch("--explain", group=_KERAS,
        help="say what its step sums, gathers and computes whole, by line of code")
    resume: str | None = _option("--resume", metavar="FOLDER", group=_KERAS,
        help="keep the state of the script there, and continue from it if it has one")
    set: Sequence[Setting] = _option("--set", action=_Read, const=Setting.of, default=[],
        group=_KERAS, metavar="NAME=VALUE",
        help="an option of collective.fit for it: accumulate=4")
    output: str | None = _option("--output", choices=("rank0", "all"), group=_KERAS,
        help="whose standard output is shown (default: rank0)")

    hosts: str = _hosts("-H", "--hosts", metavar="LIST",
        help="node1:2,node2:2 or node[01-04]:2")
    hostfile: str = _hosts("-hostfile", "--hostfile", metavar="FILE", help="in any dialect")
    host_discovery_script: str = _hosts("--host-discovery-script", metavar="COMMAND",
        help="prints host:slots lines; run each second, and ranks follow the slots")

    agent: bool = _switch("--agent", group=_AGENTS,
        help="this command runs on every node; node 0 starts the job")
    nodes: int | None = _count("--nodes", group=_AGENTS,
        help="number of nodes (srun and TF_CONFIG say)")
    node: int | None = _option("--node", type=int, metavar="I", group=_AGENTS,
        help="number of this node (they, or JOB_COMPLETION_INDEX)")
    head: str = _option("--head", default="", metavar="HOST:PORT", group=_AGENTS,
        help="where node 0 listens")
    # This holds for a host that the discovery script prints without slots, too.
    slots_per_host: int | None = _count("--slots-per-host", "--slots", group=_AGENTS,
        help="ranks on a node (1)")

    nics: Sequence[str] = _option("--network-interfaces", "--network-interface",
        action="extend", type=_split, default=[], metavar="LIST", group=SEVERAL,
        help="eth0,eth1: carry the traffic")
    heartbeat: int = _option("--heartbeat", type=int, metavar="SECONDS", default=10, least=2,
        unit=" seconds", hint="--heartbeat 10", group=SEVERAL,
        help="give up a host that is silent so long (%(default)s; Open MPI)")
    # None: each of the three has its own default.
    start_timeout: int | None = _time("--start-timeout", unit=" second",
        hint="--start-timeout 120", group=SEVERAL,
        help="for ssh to connect (8), a host to answer (30), ranks to start (120)")
    # None: the mpirun of this environment or of the PATH.
    mpirun: str | None = _option("--mpirun", metavar="PROGRAM", group=SEVERAL,
        help="which mpirun, where there are several")
    mpi_args: Sequence[str] = _option("--mpi-args", default=(), metavar="ARGS", group=SEVERAL,
        action=_Read, const=functools.partial(_words, "--mpi-args"),
        help='further options of mpirun: --mpi-args="..."')
    # If there are any, the launcher does not bind ranks.
    binding_args: Sequence[str] = _option("--binding-args", default=(), metavar="ARGS",
        group=SEVERAL, action=_Read, const=functools.partial(_words, "--binding-args"),
        help="mpirun's options to bind ranks to cores, in place of ours")
    tcp: bool = _switch("--tcp", group=SEVERAL, help="MPI uses TCP only")
    use_mpi: bool = _switch("--mpi", group=SEVERAL, excludes="--mpi",
        help="mpirun even on one host")
    use_gloo: bool = _switch("--gloo", group=SEVERAL, excludes="--mpi",
        help="never mpirun: one host")

    output_filename: Path | None = _option("--output-filename", type=Path, metavar="DIR",
        group="output", help="to DIR/rank.NN/{stdout,stderr}")
    timestamp: bool = _switch("-prefix-timestamp", "--prefix-output-with-timestamp",
        group="output", help="begin each line with the time")
    no_prefix: bool = _switch("--no-prefix", group="output",
        help="pass the ranks' output as it is")
    # fmt: on

    @property
    def style(self) -> OutputStyle:
        """Return how the output of the ranks is shown."""
        separate = self.output_filename is not None or self.timestamp
        return OutputStyle(
            prefix=not self.no_prefix,
            timestamp=self.timestamp,
            directory=self.output_filename,
            appends=self.appends,
            plain_stdout=self.keras and self.output != "all" and not separate,
        )

    def seconds(self, variable: str, otherwise: float) -> float:
        """Return a time set by an option or the environment, or raise a UsageError."""
        return seconds(variable, otherwise, self.variables.get(variable, ""))

    @property
    def rank_timeout_seconds(self) -> float:
        """Return ``rank_timeout`` or its default.

        Raises:
            UsageError: If it is not a time, or the whole job would end earlier.
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
        """Return how long a rank whose work is over may take to end."""
        return self.seconds(TIMEOUT, TIMEOUT_SECONDS)

    @property
    def rank_variables(self) -> dict[str, str]:
        """Return all variables that the ranks get for the options."""
        found = {**log_variables(), **self.variables, "PYTHONUNBUFFERED": "1"}
        if self.min_np is not None:
            found[MIN_NP] = str(self.min_np)
            found[RANK_TIMEOUT] = f"{self.rank_timeout_seconds:g}"
        if self.max_np is not None:
            found[MAX_NP] = str(self.max_np)
        return found


def declared() -> list[Field[Any]]:
    """Return the fields of ``LaunchOptions`` that are options of the command line."""
    return [each for each in fields(LaunchOptions) if each.metadata]


def add_options(parser: argparse.ArgumentParser, names: Sequence[str] = ()) -> Any:
    """Add options to a parser, in groups.

    Args:
        names: Names of fields; by default all.

    Returns:
        The groups by their titles.
    """
    groups: dict[str, Any] = {"": parser}
    for option in declared():
        if names and option.name not in names:
            continue
        title, excludes = option.metadata["group"], option.metadata["excludes"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if excludes and excludes not in groups:
            groups[excludes] = groups[title].add_mutually_exclusive_group()
        groups[excludes or title].add_argument(
            *option.metadata["names"],
            dest=option.name,
            default=[] if option.default is MISSING else option.default,
            **option.metadata["argument"],
        )
    return groups


def refuse_options(parser: argparse.ArgumentParser) -> None:
    """Have a parser raise a UsageError for unknown and removed options."""
    for name in _REFUSED:
        parser.add_argument(name, action=_Refuse, nargs=0, help=argparse.SUPPRESS)


def from_parsed(parsed: argparse.Namespace) -> LaunchOptions:
    """Return the options of a parser that has all or some of them, and ``command``."""
    names = [each.name for each in declared() if hasattr(parsed, each.name)]
    given = {name: getattr(parsed, name) for name in ("command", *names)}
    return LaunchOptions(**given)


def words(options: LaunchOptions, names: Sequence[str]) -> list[str]:
    """Return the options that differ from their defaults, as they are typed."""
    found = []
    for option in declared():
        value = getattr(options, option.name)
        if option.name not in names or value in (option.default, []):
            continue
        name = option.metadata["names"][-1]
        if value is True:
            found.append(name)
        elif option.name == "set":  # given once for each
            found += [f"{name}={each}" for each in value]
        else:
            text = value if isinstance(value, (str, Path)) else shlex.join(value)
            found.append(f"{name}={text}")
    return found
