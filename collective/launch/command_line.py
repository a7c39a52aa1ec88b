"""The command line: horovodrun's own flags, read the way horovodrun reads them.

Everything from the first word that is not an option is the command. An option that is
typed overrides the file of ``--config-file``, wherever the two stand.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from collective.errors import UsageError
from collective.launch import horovod_settings, keras_script, remote_shell
from collective.launch.options import (
    COOLDOWN_SECONDS,
    ELASTIC_SECONDS,
    HEARTBEAT_SECONDS,
    ElasticOptions,
    LaunchOptions,
    MpiOptions,
)
from collective.launch.output import OutputStyle
from collective.launch.versions import installed

EXAMPLE = "python -m collective.launch -np 2 python train.py"
_JSRUN = "LSF's jsrun is not supported; within an allocation: -H or --hostfile"


def parse(arguments: Sequence[str] | None = None) -> LaunchOptions:
    """Reads the command line and, if it names one, the configuration file.

    Raises:
        UsageError: For options that contradict each other or are out of range, or a
            configuration file that cannot be used.
        SystemExit: From argparse: 0 for ``--help``, 2 for bad arguments.
    """
    parsed = parser().parse_args(arguments)
    parsed.nics = [nic for given in parsed.nics for nic in given.split(",") if nic]
    if parsed.config_file:
        horovod_settings.read_config(parsed.config_file, parsed)
    if not parsed.check_build:
        _check(parsed)
    of_rank_zero = parsed.keras and parsed.output != "all"
    return LaunchOptions(
        command=_command(parsed),
        num_proc=parsed.num_proc,
        hosts=parsed.hosts or "",
        hostfile=parsed.hostfile or "",
        elastic=_elastic(parsed),
        mpi=MpiOptions(
            program=parsed.mpirun,
            always=parsed.use_mpi,
            never=parsed.use_gloo,
            nics=parsed.nics,
            tcp=parsed.tcp_flag,
            heartbeat=parsed.heartbeat,
            binding=_words("--binding-args", parsed.binding_args),
            arguments=_words("--mpi-args", parsed.mpi_args),
        ),
        shell=remote_shell.from_options(parsed),
        style=OutputStyle(
            prefix=not parsed.no_prefix,
            timestamp=parsed.prefix_output_with_timestamp,
            directory=Path(parsed.output_filename) if parsed.output_filename else None,
            plain_stdout=of_rank_zero
            and not (parsed.output_filename or parsed.prefix_output_with_timestamp),
        ),
        variables=horovod_settings.variables(parsed),
        start_timeout=parsed.start_timeout,
        verbose=parsed.verbose,
        dry_run=parsed.dry_run,
        check_build=parsed.check_build,
    )


def _check(parsed: argparse.Namespace) -> None:
    if parsed.num_proc is not None and parsed.num_proc < 1:
        raise UsageError(
            f"-np {parsed.num_proc}: at least 1 rank is needed", hint=EXAMPLE
        )
    if parsed.start_timeout is not None and parsed.start_timeout < 1:
        raise UsageError(
            f"--start-timeout {parsed.start_timeout}: at least 1 second",
            hint="--start-timeout 120",
        )
    if parsed.heartbeat < 2:
        raise UsageError(
            f"--heartbeat {parsed.heartbeat}: at least 2 seconds", hint="--heartbeat 10"
        )
    script = parsed.host_discovery_script
    if script and (parsed.max_np is None or parsed.hosts or parsed.hostfile):
        raise UsageError(
            "--host-discovery-script needs --max-np, and replaces -H and --hostfile",
            hint="--min-np 2 --max-np 4 --host-discovery-script ./discover.sh",
        )
    first, last = parsed.blacklist_cooldown_range or COOLDOWN_SECONDS
    if not 0 < first <= last:
        raise UsageError(
            f"--blacklist-cooldown-range {first} {last}: the first number is at least "
            "1, and at most the second",
            hint="--blacklist-cooldown-range 10 100",
        )
    for name, least in (
        ("--min-np", parsed.min_np),
        ("--max-np", parsed.max_np),
        ("--elastic-timeout", parsed.elastic_timeout),
        ("--reset-limit", parsed.reset_limit),
        ("--rank-timeout", parsed.rank_timeout),
    ):
        if least is not None and not least >= 1:
            raise UsageError(f"{name} {least}: at least 1", hint=f"{name} 1")
    if parsed.rank_timeout and parsed.min_np is None and parsed.max_np is None:
        raise UsageError(
            "--rank-timeout: without --min-np every rank waits for every other",
            hint="--min-np N; or COLLECTIVE_TIMEOUT=seconds, which ends the job",
        )
    if not parsed.command:
        raise UsageError("no command to start", hint=EXAMPLE)
    keras_script.check(parsed)
    if parsed.use_gloo and parsed.use_mpi:
        raise UsageError("--gloo and --mpi exclude each other", hint="give one of them")


def _command(parsed: argparse.Namespace) -> list[str]:
    return keras_script.command(parsed) if parsed.keras else parsed.command


def _elastic(parsed: argparse.Namespace) -> ElasticOptions:
    min_np = parsed.min_np
    if parsed.max_np is not None and min_np is None:
        min_np = parsed.num_proc or 1  # as horovodrun
    least, most = parsed.blacklist_cooldown_range or COOLDOWN_SECONDS
    return ElasticOptions(
        min_np,
        parsed.max_np,
        parsed.host_discovery_script or "",
        parsed.slots_per_host,
        parsed.elastic_timeout,
        parsed.reset_limit,
        parsed.rank_timeout,
        (least, most),
    )


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"{option}={text}: {error}", hint=f'{option}="--map-by node"'
        ) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"collective.launch: {message}\nHINT: {self.prog} --help\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(f"collective {installed().get('collective', '(not installed)')}")
        parser.exit()


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        name = self.option_strings[0]
        parser.exit(2, f"collective.launch: {name}: {_JSRUN}\nHINT: {EXAMPLE}\n")


def parser() -> argparse.ArgumentParser:
    """All options, in the groups that ``--help`` shows."""
    p = _Parser(
        prog="python -m collective.launch",
        usage="%(prog)s [options] command ...",
        description="Start the ranks of a job, on this host or on several.",
        allow_abbrev=False,  # the command has options of its own: --timeline
        epilog=f"Example: {EXAMPLE}",
    )
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
    add("--slots-per-host", "--slots", type=int, metavar="N", help=argparse.SUPPRESS)
    add("--elastic-timeout", type=int, metavar="SECONDS", default=ELASTIC_SECONDS,
        help=f"for --min-np slots to be there ({ELASTIC_SECONDS})")  # fmt: skip
    add("--reset-limit", type=int, metavar="N",
        help="end an elastic job whose ranks have changed more than N times")  # fmt: skip
    add("--rank-timeout", type=float, metavar="SECONDS",
        help="with --min-np, a rank for which others wait so long counts as dead "
        "(half of COLLECTIVE_TIMEOUT: 300)")  # fmt: skip
    add("--blacklist-cooldown-range", type=int, nargs=2, metavar=("MIN", "MAX"),
        help="seconds before a lost rank is replaced: at first, and at most (1 64)")  # fmt: skip
    add("--jsrun", nargs=0, action=_Refuse, help=argparse.SUPPRESS)

    keras_script.add_options(p)
    add = p.add_argument_group("hosts").add_mutually_exclusive_group().add_argument
    add("-H", "--hosts", metavar="LIST", help="node1:2,node2:2 or node[01-04]:2")
    add("-hostfile", "--hostfile", metavar="FILE", help="in any dialect")
    add("--host-discovery-script", metavar="COMMAND",
        help="prints host:slots lines; run each second, and ranks follow the slots")  # fmt: skip

    group = p.add_argument_group("several hosts")
    remote_shell.add_options(group)
    add = group.add_argument
    add("--network-interfaces", "--network-interface", dest="nics", action="append",
        default=[], metavar="LIST", help="eth0,eth1: carry the traffic")  # fmt: skip
    add("--heartbeat", type=int, metavar="SECONDS", default=HEARTBEAT_SECONDS,
        help=f"give up a host that is silent so long ({HEARTBEAT_SECONDS}; Open MPI)")  # fmt: skip
    add("--start-timeout", type=int, metavar="SECONDS",
        help="for ssh to connect (8), a host to answer (30), ranks to start (120)")  # fmt: skip
    add("--mpirun", metavar="PROGRAM", help="which mpirun, where there are several")
    add("--mpi-args", default="", metavar="ARGS",
        help='further options of mpirun: --mpi-args="..."')  # fmt: skip
    add("--binding-args", default="", metavar="ARGS",
        help="mpirun's options to bind ranks to cores, in place of ours")  # fmt: skip
    add("--tcp", dest="tcp_flag", action="store_true", help="MPI uses TCP only")
    add = group.add_mutually_exclusive_group().add_argument
    add("--mpi", dest="use_mpi", action="store_true", help="mpirun even on one host")
    add("--gloo", dest="use_gloo", action="store_true", help="never mpirun: one host")

    add = p.add_argument_group("output").add_argument
    add("--output-filename", metavar="DIR", help="to DIR/rank.NN/{stdout,stderr}")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        help="begin each line with the time")  # fmt: skip
    add("--no-prefix", action="store_true", help="pass the ranks' output as it is")

    horovod_settings.add_options(p)
    return p
