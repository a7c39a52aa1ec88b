"""Several hosts: whether they answer, are alike, and how fast their network is."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from collective.doctor.findings import Finding
from collective.hosts import Host, is_local
from collective.launch import remote_shell, versions
from collective.launch.processes import run
from collective.launch.remote_shell import RemoteShell
from collective.net import shared_secret

_SECONDS = 120
_AT_ONCE = 16
_EVERY_PAIR_UP_TO = 8  # hosts; beyond, each and the next: all pairs would take too long
_CLOCKS_DIFFER = 1.0  # seconds


def examine(
    hosts: Sequence[Host], shell: RemoteShell
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Has each host examine itself.

    Returns:
        For each host that answered, what it found (``machine.examine``, with ``name``,
        and ``clock_error``, the least and the most by which its clock may be ahead of
        ours, in seconds); and a finding for each that did not.
    """

    def examined(host: Host) -> dict[str, Any] | Finding:
        command = shell.command(host, "collective.doctor", "--json", "--facts")
        start = time.time()
        answer = run(command, _SECONDS)
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

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        return _split(pool.map(examined, hosts))


def _split(
    answers: Iterable[dict[str, Any] | Finding],
) -> tuple[list[dict[str, Any]], list[Finding]]:
    every = list(answers)
    found = [answer for answer in every if isinstance(answer, Finding)]
    return [answer for answer in every if isinstance(answer, dict)], found


def compare(machines: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """What differs between hosts and should not."""
    by_name: dict[str, list[str]] = {}
    for machine in machines:
        by_name.setdefault(machine["host"], []).append(machine["name"])
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


def measure(
    hosts: Sequence[Host], shell: RemoteShell, nics: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Latency and bandwidth of each pair of hosts, one pair after the other.

    Args:
        nics: Interfaces that must carry the traffic; empty for any.

    Returns:
        For each pair ``from``, ``to`` and the result of ``wire.measure``; findings.
    """
    results, found = _split(_measured(hosts, shell))
    carried = {(r["from"], r["interface"]) for r in results}
    for name, interface in sorted(carried):
        if nics and interface not in nics:
            used = interface or "an unknown interface"
            why = (
                f"{name} reaches the other hosts by {used}, not by {' or '.join(nics)}"
            )
            hint = "list the hosts by their addresses in that network"
            found.append(Finding(why, hint))
    return results, found


def _measured(
    hosts: Sequence[Host], shell: RemoteShell
) -> Iterator[dict[str, Any] | Finding]:
    pairs = list(itertools.combinations(hosts, 2))
    if len(hosts) > _EVERY_PAIR_UP_TO:
        pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    key = shared_secret.generate()
    with contextlib.ExitStack() as servers:
        ports = {
            host: servers.enter_context(_listening(host, shell, key))
            for host in dict.fromkeys(to for _, to in pairs)
        }
        for start, to in pairs:
            port, address = ports[to], to.name
            if is_local(to) and to.name in ("localhost", "127.0.0.1", "::1"):
                yield Finding(
                    f"{to.name} means another machine on each host",
                    "list this host by the name that the other hosts know",
                )
                continue
            if port == 0:
                continue  # examine() has a finding for it
            command = shell.command(start, "collective.doctor.wire", address, str(port))
            answer = run(command, _SECONDS, f"{key}\n")
            try:
                measured = json.loads(answer.out)
                yield {"from": start.name, "to": to.name, **measured}
            except ValueError:
                why = answer.error[-200:]
                yield Finding(
                    f"{start.name} has no TCP connection to {to.name}: {why}",
                    f"see that {start.name} resolves {to.name}, and open all ports "
                    "between the hosts (firewall, security group)",
                )


@contextlib.contextmanager
def _listening(host: Host, shell: RemoteShell, key: str) -> Iterator[int]:
    """The port at which a host waits to be measured; 0 where it does not."""
    process = subprocess.Popen(
        shell.command(host, "collective.doctor.wire", host.name),
        stdin=subprocess.PIPE,  # closed when this process ends: it then ends, too
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
