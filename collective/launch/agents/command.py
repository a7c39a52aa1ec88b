"""``collectiverun --agent``: the agent of a node, which also starts the job on node 0."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence

from collective import environment, hosts, python_command
from collective.launch import slurm_job, versions
from collective.launch.agents import guard, head, node, settings
from collective.launch.options import LaunchOptions

# Options that only the agent has: first those without a value, then those with one.
_ALONE = ("--agent", "--")
_WITH_VALUE = ("--nodes", "--node", "--head")


class Agent:
    """The agent of this node.

    On node 0 it runs an ordinary launcher, for which the nodes are hosts that a remote
    shell reaches.
    """

    def __init__(self, options: LaunchOptions):
        self.options, self.code = options, 0

    def start(self, has_threads: bool = False) -> None:
        """Read which node this is, and remove from the environment what describes it.

        Raises:
            UsageError: The command line does not say which node this is, or there is no
                secret.
        """
        found, addresses = environment.detect(), environment.addresses()
        version = versions.installed().get("collective", "")
        self.mine = settings.read(self.options, found, addresses, os.environ, version)
        kept = slurm_job.for_ranks(os.environ)
        cleaned = settings.clean(os.environ, kept)
        os.environ.clear()
        os.environ.update(cleaned)

    def watch(self) -> None:
        """Run the agent until the job has ended on all nodes."""
        mine, launcher = self.mine, self._launcher
        if mine.node:
            self.code = guard.guarded(lambda: asyncio.run(node.run(mine)), mine.folder)
        else:
            self.code = guard.guarded(
                lambda: asyncio.run(head.run(mine, launcher)), mine.folder
            )

    def end(self) -> int:
        """Return the job's exit code; ``watch`` has ended everything."""
        return self.code

    def _launcher(self, listed: str) -> list[str]:
        elastic = self.options.max_np is not None
        words = launcher_options(self.options.typed, listed, elastic)
        return python_command.command(
            "collective.launch", *words, *self.options.command
        )


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
