"""The command line: horovodrun's own flags, read the way horovodrun reads them.

Everything from the first word that is no option is the command. An option that is
given beats the file of ``--config-file``, wherever the two stand.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from collective.errors import UsageError
from collective.launch import tuning

EXAMPLE = "python -m collective.launch -np 2 python train.py"
# horovodrun has these; here is why we do not.
_REFUSED = {
    "--jsrun": "LSF's jsrun is not supported; within an allocation: -H or --hostfile",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line and, if it names one, the configuration file.

    Returns:
        The options; ``command`` is a list, ``nics`` a list of interfaces.

    Raises:
        UsageError: For what makes no sense, or a configuration file that does not.
        SystemExit: From argparse: 0 for ``--help``, 2 for bad arguments.
    """
    options = parser().parse_args(arguments)
    options.nics = [nic for given in options.nics for nic in given.split(",") if nic]
    if options.config_file:
        tuning.read_config(options.config_file, options)
    if options.check_build:
        return options
    if options.num_proc is not None and options.num_proc < 1:
        raise UsageError(
            f"-np {options.num_proc}: at least 1 rank is needed", hint=EXAMPLE
        )
    if options.start_timeout is not None and options.start_timeout < 1:
        raise UsageError(
            f"--start-timeout {options.start_timeout}: at least 1 second",
            hint="--start-timeout 120",
        )
    _check_elastic(options)
    if not options.command:
        raise UsageError("no command to start", hint=EXAMPLE)
    if options.use_gloo and options.use_mpi:
        raise UsageError("--gloo and --mpi exclude each other", hint="give one of them")
    return options


def _check_elastic(options: argparse.Namespace) -> None:
    script = options.host_discovery_script
    if script and (options.max_np is None or options.hosts or options.hostfile):
        raise UsageError(
            "--host-discovery-script needs --max-np, and takes the place of -H and "
            "--hostfile",
            hint="--min-np 2 --max-np 4 --host-discovery-script ./discover.sh",
        )
    if options.max_np is not None and options.min_np is None:
        options.min_np = options.num_proc or 1  # as horovodrun
    for name, least in (("min_np", options.min_np), ("max_np", options.max_np)):
        if least is not None and least < 1:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {least}: at least 1", hint=f"{option} 1")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"collective.launch: {message}\nHINT: {self.prog} --help\n")


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        name = self.option_strings[0]
        parser.exit(
            2, f"collective.launch: {name}: {_REFUSED[name]}\nHINT: {EXAMPLE}\n"
        )


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
        help="go on without ranks that die, while N are left (docs/how-to/elastic.md)")  # fmt: skip
    add("--max-np", "--max-num-proc", type=int, metavar="N",
        help="start new ranks for those that are lost, up to N in all")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help="program and arguments of each rank")
    add("-cb", "--check-build", action="store_true",
        help="show what this installation can do, as horovodrun does")  # fmt: skip
    add("--verbose", action="store_true", help="tell what is started and how it ends")
    add("--dry-run", action="store_true", help="only print what would be started")
    add("--config-file", metavar="FILE", help="YAML with horovodrun's settings")
    add("--disable-cache", action="store_true", help=argparse.SUPPRESS)

    add = p.add_argument_group("hosts").add_mutually_exclusive_group().add_argument
    add("-H", "--hosts", metavar="LIST", help="node1:2,node2:2 or node[01-04]:2")
    add("-hostfile", "--hostfile", metavar="FILE", help="in any dialect")
    add("--host-discovery-script", metavar="COMMAND",
        help="prints host:slots, again and again: ranks come and go with the slots")  # fmt: skip
    p.add_argument("--slots-per-host", "--slots", type=int, metavar="N",
        help=argparse.SUPPRESS)  # fmt: skip

    group = p.add_argument_group("across hosts")
    add = group.add_argument
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add("--remote-shell", default=os.environ.get("COLLECTIVE_REMOTE_SHELL", "ssh"),
        metavar="PROGRAM", help="what reaches a host, in place of ssh")  # fmt: skip
    add("--network-interfaces", "--network-interface", dest="nics", action="append",
        default=[], metavar="LIST", help="eth0,eth1: carry the traffic")  # fmt: skip
    add("--start-timeout", type=int, metavar="SECONDS",
        help="how long hosts and ranks have to answer (30 and 60)")  # fmt: skip
    add("--mpirun", metavar="PROGRAM", help="which, where there are several")
    add(
        "--mpi-args", default="", metavar="ARGS", help='more for mpirun: --mpi-args="…"'
    )
    add("--binding-args", default="", metavar="ARGS", help="in place of our binding")
    add("--tcp", dest="tcp_flag", action="store_true", help="MPI talks by TCP only")
    controller = group.add_mutually_exclusive_group()
    controller.add_argument(
        "--mpi", dest="use_mpi", action="store_true", help="mpirun even on one host"
    )
    controller.add_argument(
        "--gloo", dest="use_gloo", action="store_true", help="never mpirun: one host"
    )

    add = p.add_argument_group("output").add_argument
    add("--output-filename", metavar="DIR", help="to DIR/rank.NN/{stdout,stderr}")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
        help="begin each line with the time")  # fmt: skip
    add("--no-prefix", action="store_true", help="pass the ranks' output as it is")

    tuning.add_options(p)
    for name in _REFUSED:
        add(name, nargs=0 if name == "--jsrun" else 1, action=_Refuse,
            help=argparse.SUPPRESS)  # fmt: skip
    return p
