"""Networks that are bad, lead nowhere, or must not be used."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import launch
from tests.hosts import lab, switch
from tests.hosts.lab import NETWORK, SECOND

TWO = ("-H", f"{NETWORK}.1:1,{NETWORK}.2:1")
SUMS = """
import collective, numpy as np, os, sys, time
collective.init()
print("begins", flush=True)
for step in range(int(sys.argv[1])):
    total = collective.allreduce(np.full(20_000, 1.0 + collective.rank()), collective.Sum)
    assert (total == 3).all()
    time.sleep(0.02)
print("all sums", flush=True)
while sys.argv[2:] and not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""


def start(hosts: lab.Lab, *options: str, steps: int, until: str = "", **variables: str):
    """Start a job of two ranks on two hosts, without a network that it may use.

    It ends after so many steps, but not before the file ``until`` exists.
    """
    words = [sys.executable, "-m", "collective.launch"]
    words += ["--remote-shell", str(hosts.agent), *options, *TWO]
    words += [sys.executable, "-c", SUMS, str(steps), *[until] * bool(until)]
    return subprocess.Popen(
        hosts.on(1, words),
        cwd=launch.ROOT,
        env=launch.environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(job: subprocess.Popen, hosts: lab.Lab, seconds: float = 360) -> tuple[int, str]:
    """Wait for the end; return the exit code and the output."""
    try:
        printed = job.communicate(timeout=seconds)[0] if job.returncode is None else ""
    finally:
        hosts.end_all()
        job.wait(launch.PATIENCE_SECONDS)
    return job.returncode, printed


def await_ranks(job: subprocess.Popen) -> None:
    """Return when both ranks have begun."""
    assert job.stdout is not None
    begun = 0
    while begun < 2:
        line = job.stdout.readline()
        assert line, "it has ended"
        begun += bool(re.search(r"\] begins$", line.rstrip()))


@pytest.fixture(scope="module")
def two_networks():
    with lab.hosts(2, second=True) as made:
        yield made


@pytest.fixture(scope="module")
def bad_network():
    if reason := switch.why_not():
        pytest.skip(reason)
    with lab.hosts(2, bad=True) as made:
        yield made


def test_a_network_that_leads_nowhere_is_named(two_networks):
    code, printed = end(start(two_networks, steps=3), two_networks)
    assert code != 0
    *_, last = printed.splitlines()
    assert re.fullmatch(
        rf"HINT: no connection to {SECOND}.\d: that network does not join the hosts; "
        "--network-interfaces eth0 uses another",
        last,
    ), printed
    job = start(two_networks, "--network-interfaces", "eth0", steps=3)
    code, printed = end(job, two_networks)
    assert code == 0 and printed.count("] all sums") == 2, printed


def listeners(hosts: lab.Lab, host: int) -> dict[str, set[int]]:
    """Return the processes of a host that listen at each IPv4 address, with their ports."""
    inside = ["ip", "netns", "exec", hosts.name(host), "cat", "/proc/net/tcp"]
    table = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
    sockets = {}
    for row in table.splitlines()[1:]:
        words = row.split()
        if words[3] == "0A":  # LISTEN
            address, _, port = words[1].partition(":")
            parts = [str(int(address[i : i + 2], 16)) for i in (6, 4, 2, 0)]
            sockets[f"socket:[{words[9]}]"] = ".".join(parts), int(port, 16)
    found: dict[str, set[int]] = {}
    for process in hosts.processes_of(host):
        for file in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError, KeyError):
                address, port = sockets[os.readlink(file)]
                found.setdefault(address, set()).add(port)
    return found


def test_ports_are_those_that_security_md_has_a_firewall_limit(two_networks, tmp_path):
    page = (launch.ROOT / "docs" / "reference" / "security.md").read_text()
    (options,) = re.findall(r'--mpi-args="(--prtemca [^"]*)"', page)
    job = start(
        two_networks,
        "--network-interfaces",
        "eth0",
        f"--mpi-args={options}",
        steps=3,
        until=str(tmp_path / "seen"),
    )
    try:
        await_ranks(job)
        found = [listeners(two_networks, host) for host in (1, 2)]
    finally:
        (tmp_path / "seen").touch()
        code, printed = end(job, two_networks)
    assert code == 0, printed
    for by_address in found:
        everywhere = by_address.pop("0.0.0.0", set())
        assert everywhere and all(20_000 <= port < 21_000 for port in everywhere), found
        assert {*by_address} <= {"127.0.0.1"}, found


def test_a_bad_network_only_takes_time(bad_network):
    with bad_network.switch.at(loss=0.02, delay=0.01):
        job = start(bad_network, "--network-interfaces", "eth0", steps=20)
        code, printed = end(job, bad_network)
    assert code == 0 and printed.count("] all sums") == 2, printed


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_nothing_is_left_behind_where_long_frames_are_lost(when, bad_network):
    """A router that drops them silently has this effect (an MTU hole)."""
    late = when == "later"
    options = [
        "--network-interfaces",
        "eth0",
        "--start-timeout",
        "200" if late else "15",
    ]
    with contextlib.ExitStack() as stack:
        if not late:
            stack.enter_context(bad_network.switch.at(longest=1000))
        job = start(bad_network, *options, steps=10_000, COLLECTIVE_TIMEOUT="5")
        stack.callback(end, job, bad_network)
        if late:
            await_ranks(job)
            stack.enter_context(bad_network.switch.at(longest=1000))
        printed = job.communicate(timeout=360)[0]
        deadline = time.monotonic() + launch.PATIENCE_SECONDS
        while bad_network.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [Path(f"/proc/{p}/cmdline") for p in bad_network.processes()]
        assert [file.read_text() for file in left] == [], printed
        assert job.returncode == (1 if late else 124) and "HINT" in printed, printed
