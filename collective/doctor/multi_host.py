"""Several hosts: whether they answer, can reach this one, and are alike."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from collective.doctor.findings import Finding
from collective.hosts import Host
from collective.launch import reachability, remote_shell, versions
from collective.launch.processes import run
from collective.launch.remote_shell import RemoteShell
from collective.net import shared_secret

_SECONDS = 120
_AT_ONCE = 16
_CLOCKS_DIFFER = 1.0  # seconds


def examine_hosts(
    hosts: Sequence[Host], shell: RemoteShell, nics: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Have each host examine itself, and connect back to this one.

    Args:
        nics: Interfaces of this host at which the other hosts must reach it; empty:
            any.

    Returns:
        For each host that answered, the result of ``machine.examine_machine``, with ``name``;
        ``cut_off``, the reason why it cannot open a connection to this host, or empty;
        and ``clock_error``, the least and the most by which its clock may be ahead of
        ours, in seconds. And a finding for each host that did not answer.
    """

    def examined(host: Host) -> dict[str, Any] | Finding:
        command = shell.command(host, "collective.doctor", "--facts", *way_back)
        start = time.time()
        answer = run(command, _SECONDS, f"{key}\n")
        end = time.time()
        try:
            found = json.loads(answer.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            why = answer.error[-300:] or "it printed nothing"
            return Finding(
                f"{host.name} cannot be examined: {why}", remote_shell.hint(command)
            )
        # The host read its clock between our two readings.
        ahead = (found["clock"][1] - end, found["clock"][0] - start)
        return {"name": host.name, "clock_error": ahead, **found}

    key = shared_secret.generate()
    with (
        reachability.listening(nics, key) as way_back,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        every = list(pool.map(examined, hosts))
    silent = [answer for answer in every if isinstance(answer, Finding)]
    return [answer for answer in every if isinstance(answer, dict)], silent


def differences(machines: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the faults between hosts: no connection, or a difference."""
    by_name: dict[str, list[str]] = {}
    for machine in machines:
        by_name.setdefault(machine["host"], []).append(machine["name"])
        if machine["cut_off"]:
            yield Finding(
                f"{machine['name']} cannot reach this host: {machine['cut_off']}",
                "open all ports between the hosts (firewall, security group), or name "
                "another interface: --network-interfaces",
            )
        least, most = machine["clock_error"]
        if least > _CLOCKS_DIFFER or most < -_CLOCKS_DIFFER:
            off = least if least > 0 else most
            yield Finding(
                f"the clock of {machine['name']} is {abs(off):.1f} s "
                f"{'ahead' if off > 0 else 'behind'}",
                f"on {machine['name']}: timedatectl set-ntp true",
            )
    for name, hosts in by_name.items():
        if len(hosts) > 1:
            yield Finding(
                f"{' and '.join(hosts)} both call themselves {name!r}; MPI and "
                "NCCL would take them for one host",
                "hostnamectl set-hostname NAME, with another name on each",
            )
    every = {
        m["name"]: m["versions"] | {"mpirun": m["mpi"]["family"]} for m in machines
    }
    for kind, which in versions.differing(every).items():
        yield Finding(f"{kind} differs: {which}", "install the same version everywhere")
