"""Asks every host for an answer before mpirun does: its errors name the host."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shlex
import sys
from collections.abc import Sequence

from collective.errors import CollectiveError
from collective.hosts import Host
from collective.launch import probe, single_host, versions
from collective.launch.run_command import ask
from collective.net import shared_secret

SECONDS = 30  # for an answer
_CONNECT_SECONDS = 8  # for ssh to get through to the host at all
_AT_ONCE = 32


def ssh_options(options: argparse.Namespace) -> list[str]:
    """What ``-p`` and ``-i`` are for ssh."""
    words = []
    if options.ssh_port:
        words += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file:
        words += ["-i", options.ssh_identity_file]
    return words


def on(host: Host, options: argparse.Namespace, module: str, *words: str) -> list[str]:
    """The command that runs a module of ours on a host: the same Python, same folder."""
    command = [sys.executable, "-m", module, *words]
    if single_host.is_here(host):
        return command
    quiet = []
    if options.remote_shell == "ssh":
        # Never ask for a password: nobody would see the question.
        limit = options.start_timeout or _CONNECT_SECONDS
        quiet = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={limit}"]
    if path := os.environ.get("PYTHONPATH"):
        command = ["env", f"PYTHONPATH={path}", *command]
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return [options.remote_shell, *quiet, *ssh_options(options), host.login, there]


def without_password(command: Sequence[str]) -> str:
    """The HINT for a host that cannot be reached."""
    return f"this must work without a password: {shlex.join(command)}"


def check(
    hosts: Sequence[Host], options: argparse.Namespace, mpirun: str
) -> dict[str, str]:
    """Has each host but this one say what it has, and connect to this one.

    Args:
        hosts: Each with a rank.
        options: Of the command line.
        mpirun: Program that must be there on each.

    Returns:
        Hosts that cannot open a connection to this one, each with why. That ends no
        job by itself: mpirun may know a way that we do not.

    Raises:
        CollectiveError: Naming the hosts that do not answer and why, or the versions
            that differ.
    """
    seconds = options.start_timeout or SECONDS
    others = [host for host in hosts if not single_host.is_here(host)]
    if not others:
        return {}
    key = shared_secret.make()
    with (
        probe.listening(options.nics, key) as way_back,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        words = ["--mpirun", mpirun, *way_back]
        commands = [
            on(host, options, "collective.launch.probe", *words) for host in others
        ]
        answers = list(
            pool.map(lambda command: ask(command, seconds, key + "\n"), commands)
        )
    found, silent = {}, {}
    for host, command, answer in zip(others, commands, answers, strict=True):
        try:
            found[host.name] = json.loads(answer.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            code = "" if answer.code is None else f" (exit code {answer.code})"
            silent[f"{host.name}: {answer.said[-300:] or 'no message'}{code}"] = command
    if silent:
        raise CollectiveError(
            "cannot reach every host:\n  " + "\n  ".join(silent),
            hint=without_password(next(iter(silent.values()))),
        )
    _compare({name: said["versions"] for name, said in found.items()}, mpirun)
    return {name: said["cut_off"] for name, said in found.items() if said["cut_off"]}


def _compare(found: dict[str, dict[str, str]], mpirun: str) -> None:
    unequal = versions.differing({"this host": probe.found_here(mpirun), **found})
    if unequal:
        told = "\n  ".join(f"{name}: {who}" for name, who in unequal.items())
        raise CollectiveError(
            f"the hosts have different versions:\n  {told}",
            hint="install the same on every host, at the same path "
            f"({sys.prefix}); python -m collective.doctor with the same hosts tells more",
        )
