"""``collectiverun --agent``: the agent of this node, which also starts the job on node 0."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Sequence

from collective import environment, hosts, python_command
from collective.errors import CollectiveError
from collective.launch import processes, slurm, versions
from collective.launch.agents import guard, head, node, settings, shell
from collective.launch.options import LaunchOptions

_SECONDS = 20.0


def run(options: LaunchOptions, arguments: Sequence[str]) -> int:
    """Runs the agent of this node; returns the job's exit code.

    On node 0 the same command line is run again by the launcher, within the agents' reach.

    Raises:
        UsageError: The command line does not say which node this is, or there is no secret.
    """
    found, addresses = environment.detect(), environment.addresses()
    version = versions.installed().get("collective", "")
    mine = settings.read(options, found, addresses, os.environ, version)
    kept = slurm.for_ranks(os.environ)
    settings.in_environment(settings.clean(os.environ, kept))
    if mine.node:
        return guard.guarded(lambda: asyncio.run(node.run(mine)), mine.folder)
    again = python_command.command("collective.launch", *arguments)
    return guard.guarded(lambda: asyncio.run(head.run(mine, again)), mine.folder)


def is_running() -> bool:
    """Whether an agent has started this launcher."""
    return shell.SOCKET in os.environ


def with_agents(options: LaunchOptions) -> LaunchOptions:
    """The options of the launcher that an agent has started: it asks the head for hosts.

    Raises:
        CollectiveError: If the head does not answer.
    """
    program = str(head.SSH)
    reach = dataclasses.replace(options.shell, program=program)
    if options.max_np is not None:
        return dataclasses.replace(options, shell=reach, host_discovery_script=program)
    answer = processes.run([program], _SECONDS)
    if answer.code != 0:
        raise CollectiveError(
            f"the head of the agents does not answer: {answer.error}",
            hint="start the job again by collectiverun --agent",
        )
    found = hosts.parse(answer.out, "the agents")
    return dataclasses.replace(options, shell=reach, hosts=hosts.write(found, "list"))
