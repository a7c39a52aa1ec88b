"""The command line: horovodrun's own flags, read the way horovodrun reads them.

Everything from the first word that is not an option is the command. An option that is
typed overrides the file of ``--config-file``, wherever the two stand. With ``--keras`` the
command is a Keras script that knows of no ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from collective import fit_options
from collective.command_parser import Parser, program
from collective.errors import UsageError
from collective.launch import horovod_settings, plain_keras, remote_shell
from collective.launch.options import LaunchOptions
from collective.launch.output import OutputStyle, print_message
from collective.launch.versions import installed
from collective.python_command import arguments

EXAMPLE = "collectiverun -np 2 python train.py"
_BY_MPI = ("mpi", "horovod")  # backends whose ranks mpirun starts
_KERAS_EXAMPLE = "collectiverun -np 4 --keras script.py"


def parse(typed: Sequence[str] | None = None) -> LaunchOptions:
    """Reads the command line and, if it names one, the configuration file.

    Raises:
        UsageError: For options that contradict each other or are out of range, or a
            configuration file that cannot be used.
        SystemExit: From argparse: 0 for ``--help``, 2 for bad arguments.
    """
    parsed = parser().parse_args(typed)
    if parsed.check_build:
        return LaunchOptions(check_build=True)
    parsed.nics = [nic for given in parsed.nics for nic in given.split(",") if nic]
    parsed.cooldown = tuple(parsed.cooldown or LaunchOptions.cooldown)
    if parsed.config_file:
        horovod_settings.read_config(parsed.config_file, parsed)
    _check(parsed)
    _check_keras(parsed)
    _note_misplaced(parsed)
    if parsed.max_np is not None and parsed.min_np is None:
        parsed.min_np = parsed.num_proc or 1  # as horovodrun
    if parsed.keras:
        parsed.use_mpi |= parsed.backend in _BY_MPI and not parsed.use_gloo
        parsed.command = _keras_command(parsed)
    parsed.binding_args = _words("--binding-args", parsed.binding_args)
    parsed.mpi_args = _words("--mpi-args", parsed.mpi_args)
    parsed.shell = remote_shell.from_options(parsed)
    parsed.variables = horovod_settings.variables(parsed)
    directory, timestamp = parsed.output_filename, parsed.prefix_output_with_timestamp
    of_rank_zero = parsed.keras and parsed.output != "all"
    parsed.style = OutputStyle(
        prefix=not parsed.no_prefix,
        timestamp=timestamp,
        directory=directory,
        plain_stdout=of_rank_zero and not (directory or timestamp),
    )
    names = [field.name for field in dataclasses.fields(LaunchOptions)]
    return LaunchOptions(**{name: getattr(parsed, name) for name in names})


def _check(parsed: argparse.Namespace) -> None:
    if parsed.jsrun:
        raise UsageError(
            "--jsrun: LSF's jsrun is not supported; within an allocation: -H or "
            "--hostfile",
            hint=EXAMPLE,
        )
    for name, value, least, unit, hint in (
        ("-np", parsed.num_proc, 1, " rank is needed", EXAMPLE),
        ("--start-timeout", parsed.start_timeout, 1, " second", "--start-timeout 120"),
        ("--heartbeat", parsed.heartbeat, 2, " seconds", "--heartbeat 10"),
        ("--min-np", parsed.min_np, 1, "", "--min-np 1"),
        ("--max-np", parsed.max_np, 1, "", "--max-np 1"),
        ("--nodes", parsed.nodes, 1, "", "--nodes 2"),
        ("--slots-per-host", parsed.slots_per_host, 1, "", "--slots-per-host 1"),
        ("--elastic-timeout", parsed.elastic_timeout, 1, "", "--elastic-timeout 1"),
        ("--reset-limit", parsed.reset_limit, 1, "", "--reset-limit 1"),
        ("--rank-timeout", parsed.rank_timeout, 1, "", "--rank-timeout 1"),
    ):
        if value is not None and not value >= least:
            raise UsageError(f"{name} {value}: at least {least}{unit}", hint=hint)
    script = parsed.host_discovery_script
    if script and (parsed.max_np is None or parsed.hosts or parsed.hostfile):
        raise UsageError(
            "--host-discovery-script needs --max-np, and replaces -H and --hostfile",
            hint="--min-np 2 --max-np 4 --host-discovery-script ./discover.sh",
        )
    if parsed.agent and (parsed.hosts or parsed.hostfile or script):
        raise UsageError(
            "--agent replaces -H, --hostfile and --host-discovery-script",
            hint="--agent --nodes 2 --head node0:7070",
        )
    of_agents = parsed.head or parsed.nodes or parsed.encrypt
    if not parsed.agent and (of_agents or parsed.node is not None):
        raise UsageError(
            "--head, --nodes, --node and --encrypt are for --agent",
            hint="collectiverun --agent --nodes 2 --head node0:7070 python train.py",
        )
    first, last = parsed.cooldown
    if not 0 < first <= last:
        raise UsageError(
            f"--blacklist-cooldown-range {first} {last}: the first number is at least "
            "1, and at most the second",
            hint="--blacklist-cooldown-range 10 100",
        )
    if parsed.rank_timeout and parsed.min_np is None and parsed.max_np is None:
        raise UsageError(
            "--rank-timeout: without --min-np every rank waits for every other",
            hint="--min-np N; or COLLECTIVE_TIMEOUT=seconds, which ends the job",
        )
    if parsed.requeue_on and parsed.max_np is not None:
        raise UsageError(
            "--requeue-on with --max-np: the whole job starts again, with its hosts",
            hint="leave --max-np out",
        )
    if not parsed.command:
        raise UsageError("no command to start", hint=EXAMPLE)
    if parsed.use_gloo and parsed.use_mpi:
        raise UsageError("--gloo and --mpi exclude each other", hint="give one of them")


def start_of(ranks: int | None) -> str:
    """What to type in front of a command."""
    return f"collectiverun -np {ranks}" if ranks else "collectiverun"


def _check_keras(parsed: argparse.Namespace) -> None:
    if not parsed.keras:
        plain_keras.check_program(parsed.command, start_of(parsed.num_proc))
        for option in ("backend", "output", "loops", "set"):
            if getattr(parsed, option):
                raise UsageError(
                    f"--{option} goes with --keras; the command takes options of its "
                    "own behind it",
                    hint=_KERAS_EXAMPLE,
                )
        return
    if parsed.max_np or parsed.host_discovery_script:
        raise UsageError(
            "--keras with --max-np or --host-discovery-script: a rank that joins would "
            "begin the script where the others are in its middle",
            hint="call collective.fit in the script (docs/how-to/elastic.md); or "
            "--min-np alone: the job continues without ranks that die",
        )
    if parsed.min_np and parsed.loops:
        raise UsageError(
            "--loops with --min-np: a step of a training loop cannot be made again "
            "without a rank that has died in it",
            hint="leave one of them out",
        )
    first, *others = parsed.command
    if plain_keras.is_python(first) and not plain_keras.Program.of(parsed.command):
        raise UsageError(
            f"--keras takes a script, not {' '.join([first, *others[:1]])!r}",
            hint=_KERAS_EXAMPLE,
        )
    importlib.import_module("collective.keras_backend")  # which may refuse it
    fit_options.settings(parsed.set)


def _note_misplaced(parsed: argparse.Namespace) -> None:
    """Says which options of the launcher's follow the script, which gets them."""
    options = {
        name: action.nargs != 0
        for action in parser()._actions
        for name in action.option_strings
        if name not in ("-h", "--help", "-v", "--version", "--verbose")
    }
    start = start_of(parsed.num_proc)
    if text := plain_keras.misplaced(parsed.command, options, parsed.keras, start):
        print_message(text)


def _keras_command(parsed: argparse.Namespace) -> list[str]:
    """What each rank runs; a ``python`` in front of the script is left as it is."""
    program = plain_keras.Program.of(parsed.command)
    python, words = [sys.executable], list(parsed.command)
    if program is not None and program.python:
        python, words = list(program.python), [*program.words, *program.arguments]
    options = ["--backend", parsed.backend] if parsed.backend else []
    options += ["--loops"] if parsed.loops else []
    options += ["--explain"] if parsed.explain else []
    options += [f"--set={value}" for value in parsed.set]
    # Each rank has files of its own then.
    output = "all" if parsed.output_filename else parsed.output
    if output:
        options += ["--output", output]
    words = [*options, *words]
    return [*python, *arguments("collective.distribute", *words, silently=True)]


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option}={text}: {error}", hint=f'{option}="--map-by node"'
        ) from None


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(f"collective {installed().get('collective', '(not installed)')}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """All options, in the groups that ``--help`` shows."""
    p = Parser(
        prog=program("python -m collective.launch"),
        usage="%(prog)s [options] command ...",
        description="Start the ranks of a job, on this host or on several.",
        allow_abbrev=False,  # the command has options of its own: --timeline
        epilog=f"Example: {EXAMPLE}",
    )
    p.whose = "collective.launch"
    p.help_command = f"{program('collectiverun')} --help"
    add = p.add_argument
    add("-np", "--num-proc", type=int, metavar="N",
        help="number of ranks; default: all slots of -H or --hostfile")  # fmt: skip
    add("--min-np", "--min-num-proc", type=int, metavar="N",
        help="continue without ranks that die, while N are left (docs/how-to/elastic.md)")  # fmt: skip
    add("--max-np", "--max-num-proc", type=int, metavar="N",
        help="replace ranks that are lost, up to N in all")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help="program and arguments of each rank")
    add("-cb", "--check-build", action="store_true",
        help="show what this installation can do, as horovodrun does")  # fmt: skip
    add("-v", "--version", nargs=0, action=_Version, help="print the version")
    add("--verbose", action="store_true", help="print what is started and how it ends")
    add("--dry-run", action="store_true", help="only print what would be started")
    add("--config-file", metavar="FILE", help="YAML with horovodrun's settings")
    add("--disable-cache", action="store_true", help=argparse.SUPPRESS)
    add("--elastic-timeout", type=int, metavar="SECONDS",
        default=LaunchOptions.elastic_timeout,
        help="for --min-np slots to be there (%(default)s)")  # fmt: skip
    add("--reset-limit", type=int, metavar="N",
        help="end an elastic job whose ranks have changed more than N times")  # fmt: skip
    add("--rank-timeout", type=float, metavar="SECONDS",
        help="with --min-np, a rank for which others wait so long counts as dead "
        "(half of COLLECTIVE_TIMEOUT: 300)")  # fmt: skip
    add("--no-overlap", action="store_true",
        help="when hosts change, end the ranks before others start: needs less memory")  # fmt: skip
    add("--requeue-on", default="", metavar="SIGNAL",
        help="in a Slurm job: save a checkpoint, requeue the job (docs/how-to/slurm.md)")  # fmt: skip
    add("--blacklist-cooldown-range", dest="cooldown", type=int, nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds before a lost rank is replaced: at first, and at most (1 64)")  # fmt: skip
    add("--jsrun", action="store_true", help=argparse.SUPPRESS)

    add = p.add_argument_group("an unedited Keras script").add_argument
    add("--keras", action="store_true",
        help="the command is script.py: its fit, evaluate and predict run on all ranks")  # fmt: skip
    add("--backend", metavar="NAME", help="who sums the gradients (default: auto)")
    add("--loops", action="store_true",
        help="cut the batches of its own training loops, too")  # fmt: skip
    add("--explain", action="store_true",
        help="say what its step sums, gathers and computes whole, by line of code")  # fmt: skip
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="an option of collective.fit for it: accumulate=4")  # fmt: skip
    add("--output", choices=("rank0", "all"),
        help="whose standard output is shown (default: rank0)")  # fmt: skip

    add = p.add_argument_group("hosts").add_mutually_exclusive_group().add_argument
    add(
        "-H",
        "--hosts",
        default="",
        metavar="LIST",
        help="node1:2,node2:2 or node[01-04]:2",
    )
    add("-hostfile", "--hostfile", default="", metavar="FILE", help="in any dialect")
    add("--host-discovery-script", default="", metavar="COMMAND",
        help="prints host:slots lines; run each second, and ranks follow the slots")  # fmt: skip

    add = p.add_argument_group(
        "agents: one process on each node, no ssh").add_argument  # fmt: skip
    add("--agent", action="store_true",
        help="this command runs on every node; node 0 starts the job")  # fmt: skip
    add(
        "--nodes",
        type=int,
        metavar="N",
        help="number of nodes (srun and TF_CONFIG say)",
    )
    add("--node", type=int, metavar="I",
        help="number of this node (they, or JOB_COMPLETION_INDEX)")  # fmt: skip
    add("--head", default="", metavar="HOST:PORT", help="where node 0 listens")
    add("--encrypt", action="store_true",
        help="encrypt what nodes say to each other (not what MPI sends)")  # fmt: skip
    add(
        "--slots-per-host", "--slots", type=int, metavar="N", help="ranks on a node (1)"
    )

    group = p.add_argument_group("several hosts")
    remote_shell.add_options(group)
    add = group.add_argument
    add("--network-interfaces", "--network-interface", dest="nics", action="append",
        default=[], metavar="LIST", help="eth0,eth1: carry the traffic")  # fmt: skip
    add("--heartbeat", type=int, metavar="SECONDS", default=LaunchOptions.heartbeat,
        help="give up a host that is silent so long (%(default)s; Open MPI)")  # fmt: skip
    add("--start-timeout", type=int, metavar="SECONDS",
        help="for ssh to connect (8), a host to answer (30), ranks to start (120)")  # fmt: skip
    add("--mpirun", metavar="PROGRAM", help="which mpirun, where there are several")
    add("--mpi-args", default="", metavar="ARGS",
        help='further options of mpirun: --mpi-args="..."')  # fmt: skip
    add("--binding-args", default="", metavar="ARGS",
        help="mpirun's options to bind ranks to cores, in place of ours")  # fmt: skip
    add("--tcp", action="store_true", help="MPI uses TCP only")
    add = group.add_mutually_exclusive_group().add_argument
    add("--mpi", dest="use_mpi", action="store_true", help="mpirun even on one host")
    add("--gloo", dest="use_gloo", action="store_true", help="never mpirun: one host")

    add = p.add_argument_group("output").add_argument
    add(
        "--output-filename",
        type=Path,
        metavar="DIR",
        help="to DIR/rank.NN/{stdout,stderr}",
    )
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        help="begin each line with the time")  # fmt: skip
    add("--no-prefix", action="store_true", help="pass the ranks' output as it is")

    horovod_settings.add_options(p)
    return p
