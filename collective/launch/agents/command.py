"""``collectiverun --agent``: the agent of a node, which also starts the job on node 0."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence

from collective import environment, hosts, python_command
from collective.launch import slurm_job, versions
from collective.launch.agents import guard, head, node, settings
from collective.launch.command_line import parser
from collective.launch.options import LaunchOptions

# Options that only the agent has: first those without a value, then those with one.
_ALONE = ("--agent", "--")
_WITH_VALUE = ("--nodes", "--node", "--head")


def run(options: LaunchOptions, arguments: Sequence[str]) -> int:
    """Run the agent of this node; return the job's exit code.

    On node 0 it runs an ordinary launcher, for which the nodes are hosts that a remote
    shell reaches.

    Raises:
        UsageError: The command line does not say which node this is, or there is no secret.
    """
    found, addresses = environment.detect(), environment.addresses()
    version = versions.installed().get("collective", "")
    mine = settings.read(options, found, addresses, os.environ, version)
    kept = slurm_job.for_ranks(os.environ)
    cleaned = settings.clean(os.environ, kept)
    os.environ.clear()
    os.environ.update(cleaned)
    if mine.node:
        return guard.guarded(lambda: asyncio.run(node.run(mine)), mine.folder)
    at = len(arguments) - len(parser().parse_args(arguments).command)
    typed, program = arguments[:at], arguments[at:]

    def launcher(listed: str) -> list[str]:
        words = [*launcher_options(typed, listed, options.max_np is not None), *program]
        return python_command.command("collective.launch", *words)

    return guard.guarded(lambda: asyncio.run(head.run(mine, launcher)), mine.folder)


def launcher_options(typed: Sequence[str], listed: str, elastic: bool) -> list[str]:
    """Return the options of the launcher that runs a job on agents.

    Args:
        typed: Options of the agent, as typed.
        listed: ``host:slots`` of each connected node, one in a line.
        elastic: Whether nodes join and leave: the remote shell prints the current ones.
    """
    words, rest = list[str](), iter(typed)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name in _WITH_VALUE and not equals:
            next(rest)
        elif name not in (*_ALONE, *_WITH_VALUE):
            words.append(word)
    shell = str(head.SSH)
    if elastic:
        where = ["--host-discovery-script", shlex.quote(shell)]
    else:
        where = ["--hosts", hosts.write(hosts.parse(listed, "the agents"), "list")]
    return [*words, "--remote-shell", shell, *where]
