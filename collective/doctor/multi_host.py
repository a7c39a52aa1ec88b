"""Several hosts: reachable, alike, and what the wires between them can do."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from collective.doctor.findings import Finding
from collective.hosts import Host
from collective.launch import single_host, versions
from collective.launch.reachable import on, without_password
from collective.launch.run_command import ask
from collective.net import shared_secret

_SECONDS = 120
_AT_ONCE = 16
_EVERY_PAIR_UP_TO = 8  # hosts; beyond, each and the next, so that it ends
_CLOCKS_DIFFER = 1.0  # seconds


def examine(
    hosts: Sequence[Host], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Has each host examine itself.

    Returns:
        What each found (``machine.examine``, with ``name``, and ``clock_error``, the
        least and the most by which its clock may be ahead of ours, in seconds), of
        those that answered; and what is wrong with the others.
    """

    def examined(host: Host) -> dict[str, Any] | Finding:
        command = on(host, options, "collective.doctor", "--json", "--facts")
        start = time.time()
        answer = ask(command, _SECONDS)
        end = time.time()
        try:
            found = json.loads(answer.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            said = answer.said[-300:] or "it said nothing"
            return Finding(
                f"{host.name} cannot be examined: {said}", without_password(command)
            )
        # It started after we asked and ended before we heard.
        ahead = (found["clock"][1] - end, found["clock"][0] - start)
        return {"name": host.name, "clock_error": ahead, **found}

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(examined, hosts))
    return (
        [answer for answer in answers if isinstance(answer, dict)],
        [answer for answer in answers if isinstance(answer, Finding)],
    )


def compare(machines: Sequence[dict[str, Any]]) -> list[Finding]:
    """What differs between hosts and should not."""
    found = []
    by_name: dict[str, list[str]] = {}
    for machine in machines:
        by_name.setdefault(machine["host"], []).append(machine["name"])
        least, most = machine["clock_error"]
        if least > _CLOCKS_DIFFER or most < -_CLOCKS_DIFFER:
            off = least if least > 0 else most
            found.append(
                Finding(
                    f"the clock of {machine['name']} is {abs(off):.1f} s "
                    f"{'ahead' if off > 0 else 'behind'}",
                    f"on {machine['name']}: timedatectl set-ntp true",
                )
            )
    for name, hosts in by_name.items():
        if len(hosts) > 1:
            found.append(
                Finding(
                    f"{' and '.join(hosts)} both call themselves {name!r}; MPI and "
                    "NCCL would take them for one host",
                    "hostnamectl set-hostname NAME, another one on each",
                )
            )
    every = {
        m["name"]: m["versions"] | {"mpirun": m["mpi"]["family"]} for m in machines
    }
    for kind, told in versions.differing(every).items():
        found.append(
            Finding(f"{kind} differs: {told}", "install the same version everywhere")
        )
    return found


def measure(
    hosts: Sequence[Host], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Latency and bandwidth of each pair of hosts, one pair after the other.

    Returns:
        For each pair ``from``, ``to``, and what ``wire.measure`` says; and what is
        wrong with the others.
    """
    pairs = list(itertools.combinations(hosts, 2))
    if len(hosts) > _EVERY_PAIR_UP_TO:
        pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    results, found = [], []
    key = shared_secret.make()
    with contextlib.ExitStack() as servers:
        ports = {
            host: servers.enter_context(_listening(host, options, key))
            for host in dict.fromkeys(to for _, to in pairs)
        }
        for start, to in pairs:
            port, address = ports[to], to.name
            if single_host.is_here(to) and to.name in ("localhost", "127.0.0.1", "::1"):
                found.append(
                    Finding(
                        f"{to.name} is another host to each host",
                        "name this host as the others know it",
                    )
                )
                continue
            if port == 0:
                continue  # told by whoever examined it
            command = on(start, options, "collective.doctor.wire", address, str(port))
            answer = ask(command, _SECONDS, f"{key}\n")
            try:
                measured = json.loads(answer.out)
                results.append({"from": start.name, "to": to.name, **measured})
            except ValueError:
                said = answer.said[-200:]
                found.append(
                    Finding(
                        f"{start.name} has no TCP connection to {to.name}: {said}",
                        f"see that {start.name} resolves {to.name}, and open all ports "
                        "between the hosts (firewall, security group)",
                    )
                )
    named = options.nics
    carried = {(r["from"], r["interface"]) for r in results}
    for name, interface in sorted(carried):
        if named and interface not in named:
            found.append(
                Finding(
                    f"{name} reaches the others by {interface or 'no interface of its'},"
                    f" not by {' or '.join(named)}",
                    "name the hosts by addresses of that network",
                )
            )
    return results, found


@contextlib.contextmanager
def _listening(host: Host, options: argparse.Namespace, key: str) -> Iterator[int]:
    """The port at which a host waits to be measured; 0 where it does not."""
    process = subprocess.Popen(
        on(host, options, "collective.doctor.wire", host.name),
        stdin=subprocess.PIPE,  # it ends with this, as when we are killed
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with contextlib.suppress(OSError):  # it could not be started
            process.stdin.write(f"{key}\n")
            process.stdin.flush()
        try:
            yield int(json.loads(process.stdout.readline())["port"])
        except ValueError:
            yield 0
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
