"""The command line: horovodrun's own flags, read the way horovodrun reads them.

The first word that is not an option begins the command. An option on the command line
overrides the file of ``--config-file``, wherever the two stand. With ``--keras`` the command
is a Keras script that knows nothing of ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from collective.command_parser import Parser, program
from collective.errors import UsageError
from collective.launch import horovod_settings, plain_keras, remote_shell
from collective.launch.options import (
    EXAMPLE,
    OF_A_SCRIPT,
    SEVERAL,
    LaunchOptions,
    add_options,
    declared,
    from_parsed,
    refuse_options,
)
from collective.launch.options import words as option_words
from collective.launch.output import print_message
from collective.launch.versions import installed
from collective.python_command import arguments

_BY_MPI = ("mpi", "horovod")  # backends whose ranks mpirun starts
_KERAS_EXAMPLE = "collectiverun -np 4 --keras script.py"


def parse(typed: Sequence[str] | None = None) -> LaunchOptions:
    """Read the command line and, if it names one, the configuration file.

    Raises:
        UsageError: For options that contradict each other or are out of range, or a
            configuration file that cannot be used.
        SystemExit: From argparse: 0 for ``--help``, 2 for bad arguments.
    """
    known = parser()
    words = sys.argv[1:] if typed is None else typed
    parsed = known.parse_args(words)
    if parsed.check_build:
        return LaunchOptions(check_build=True)
    if parsed.config_file:
        horovod_settings.read_config(parsed.config_file, parsed)
    given = from_parsed(parsed)
    _check(given)
    _check_keras(given)
    _note_misplaced(given, known)
    given = dataclasses.replace(
        given,
        typed=words[: len(words) - len(given.command)],
        shell=remote_shell.from_options(parsed),
        variables=horovod_settings.variables(parsed),
    )
    if given.max_np is not None and given.min_np is None:  # horovodrun does the same
        given = dataclasses.replace(given, min_np=given.num_proc or 1)
    if not given.keras or given.agent:  # an agent hands on the words as typed
        return given
    by_mpi = given.backend in _BY_MPI and not given.use_gloo
    return dataclasses.replace(
        given, use_mpi=given.use_mpi or by_mpi, command=_keras_command(given)
    )


def _check(parsed: LaunchOptions) -> None:
    for option in declared():
        known, value = option.metadata, getattr(parsed, option.name)
        least, name = known["least"], known["names"][0]
        if None not in (least, value) and not value >= least:
            raise UsageError(
                f"{name} {value}: at least {least}{known['unit']}",
                hint=known["hint"] or f"{name} {least}",
            )
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
    of_agents = parsed.head or parsed.nodes or parsed.node is not None
    if of_agents and not parsed.agent:
        raise UsageError(
            "--head, --nodes and --node are for --agent",
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
    if not parsed.command:
        raise UsageError("no command to start", hint=EXAMPLE)
    if parsed.use_gloo and parsed.use_mpi:
        raise UsageError("--gloo and --mpi exclude each other", hint="give one of them")


def _check_keras(parsed: LaunchOptions) -> None:
    if not parsed.keras:
        plain_keras.check_program(parsed.command, plain_keras.start_of(parsed.num_proc))
        for option in ("backend", "output", "loops", "resume", "set"):
            if getattr(parsed, option):
                raise UsageError(
                    f"--{option} goes with --keras; the command takes options of its "
                    "own behind it",
                    hint=_KERAS_EXAMPLE,
                )
        return
    if parsed.host_discovery_script or (
        parsed.max_np and (parsed.hosts or parsed.hostfile)
    ):
        raise UsageError(
            "--keras with --host-discovery-script, or with --max-np and a list of hosts: "
            "for other hosts all ranks end and start again, and the script would begin "
            "anew",
            hint="--max-np N alone: ranks of this host that die are replaced; or "
            "call collective.fit in the script (docs/how-to/elastic.md)",
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
    importlib.import_module("collective.keras_backend")  # it may refuse the variable


def _note_misplaced(parsed: LaunchOptions, known: Parser) -> None:
    """Warn about options of the launcher that follow the script, which gets them."""
    options = {
        name: action.nargs != 0
        for action in known._actions
        for name in action.option_strings
        if name not in ("-h", "--help", "-v", "--version", "--verbose")
    }
    start = plain_keras.start_of(parsed.num_proc)
    if text := plain_keras.misplaced(parsed.command, options, parsed.keras, start):
        print_message(text)


def _keras_command(parsed: LaunchOptions) -> list[str]:
    """Return the command of each rank; a ``python`` in front of the script stays."""
    program = plain_keras.Program.of(parsed.command)
    python, words = [sys.executable], list(parsed.command)
    if program is not None and program.python:
        python, words = list(program.python), [*program.words, *program.arguments]
    if parsed.output_filename:  # then each rank has files of its own
        parsed = dataclasses.replace(parsed, output="all")
    words = [*option_words(parsed, OF_A_SCRIPT), *words]
    return [*python, *arguments("collective.distribute", *words, silently=True)]


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        print(f"collective {installed().get('collective', '(not installed)')}")
        parser.exit()


def parser() -> Parser:
    """Make the parser with all options, in the groups that ``--help`` shows."""
    p = Parser(
        prog=program("python -m collective.launch"),
        usage="%(prog)s [options] command ...",
        description="Start the ranks of a job, on this host or on several.",
        allow_abbrev=False,  # or it would take options of the command
        epilog=f"Example: {EXAMPLE}",
    )
    p.whose = "collective.launch"
    p.help_command = f"{program('collectiverun')} --help"
    p.add_argument(
        "command", nargs=argparse.REMAINDER, help="program and arguments of each rank"
    )
    p.add_argument(
        "-v", "--version", nargs=0, action=_Version, help="print the version"
    )
    p.add_argument("--disable-cache", action="store_true", help=argparse.SUPPRESS)
    refuse_options(p)
    remote_shell.add_options(add_options(p)[SEVERAL])
    horovod_settings.add_options(p)
    return p
