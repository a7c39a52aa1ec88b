"""Checks every host before mpirun starts: these errors name the host, mpirun's do not."""

from __future__ import annotations

import concurrent.futures
import json
import sys
from collections.abc import Sequence

from collective.errors import CollectiveError
from collective.hosts import Host, is_local
from collective.launch import probe, remote_shell, versions
from collective.launch.processes import run
from collective.launch.remote_shell import RemoteShell
from collective.net import shared_secret

_AT_ONCE = 32


def check(
    hosts: Sequence[Host],
    shell: RemoteShell,
    nics: Sequence[str],
    mpirun: str,
    seconds: float,
) -> dict[str, str]:
    """Has each other host report its versions, and connect back to this one.

    Args:
        hosts: Each with a rank.
        shell: What reaches them.
        nics: Interfaces that carry the traffic; empty for all.
        mpirun: Program that must exist on each.
        seconds: For an answer.

    Returns:
        Hosts that cannot open a connection to this one, each with the reason. This alone
        ends no job: mpirun may know a way that this check does not.

    Raises:
        CollectiveError: Naming the hosts that do not answer and why, or the versions
            that differ.
    """
    others = [host for host in hosts if not is_local(host)]
    if not others:
        return {}
    key = shared_secret.generate()
    with (
        probe.listening(nics, key) as way_back,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        words = ["--mpirun", mpirun, *way_back]
        commands = [
            shell.command(host, "collective.launch.probe", *words) for host in others
        ]
        answers = list(
            pool.map(lambda command: run(command, seconds, f"{key}\n"), commands)
        )
    found, silent = {}, {}
    for host, command, answer in zip(others, commands, answers, strict=True):
        try:
            found[host.name] = json.loads(answer.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            code = "" if answer.code is None else f" (exit code {answer.code})"
            why = answer.error[-300:] or "no message"
            silent[f"{host.name}: {why}{code}"] = command
    if silent:
        raise CollectiveError(
            "cannot reach every host:\n  " + "\n  ".join(silent),
            hint=remote_shell.hint(next(iter(silent.values()))),
        )
    _compare({name: answer["versions"] for name, answer in found.items()}, mpirun)
    return {name: a["cut_off"] for name, a in found.items() if a["cut_off"]}


def _compare(found: dict[str, dict[str, str]], mpirun: str) -> None:
    unequal = versions.differing({"this host": probe.local_versions(mpirun), **found})
    if unequal:
        rows = "\n  ".join(f"{name}: {which}" for name, which in unequal.items())
        raise CollectiveError(
            f"the hosts have different versions:\n  {rows}",
            hint=f"install the same on every host, at the same path ({sys.prefix}); details: "
            "python -m collective.doctor with the same hosts",
        )
