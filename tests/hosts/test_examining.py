"""Our doctor on several hosts: what it measures, and what it finds wrong."""

from __future__ import annotations

import json

from tests import launch
from tests.hosts.lab import NETWORK

TWO = ["-H", f"{NETWORK}.1:2,{NETWORK}.2:2"]


def doctor(hosts, *words: str, **more) -> tuple[int | None, dict]:
    command = hosts.ours("collective.doctor", "--json", *words, **more)
    code, printed = launch.run(command, launch.environment(), 120)
    return code, json.loads(printed)


def complaints(found: dict) -> list[str]:
    return [finding["what"] for finding in found["findings"] if finding["fatal"]]


def test_every_pair_of_three_hosts_on_a_slow_link(hosts):
    names = [f"{NETWORK}.{i}" for i in (1, 2, 3)]
    with hosts.at("1gbit"):
        code, found = doctor(hosts, "-H", ",".join(f"{name}:1" for name in names))
    assert code == 0 and found["works"], found["findings"]
    assert [m["host"] for m in found["hosts"]] == ["lab1", "lab2", "lab3"]
    pairs = [(wire["from"], wire["to"]) for wire in found["wires"]]
    assert pairs == [(names[0], names[1]), (names[0], names[2]), (names[1], names[2])]
    for wire in found["wires"]:
        assert (wire["interface"], wire["address"]) == ("eth0", wire["from"])
        assert wire["latency"] > 0
        # What the link lets through, and the half megabyte before it limits.
        assert 0 < wire["bandwidth"] < 1.2 * 1e9 / 8


def test_what_is_wrong_with_another_host(hosts, tmp_path):
    """Its keras, its clock and its name."""
    other = tmp_path / "keras-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: keras\nVersion: 0.0.1"
    )
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, time\n"
        "real = time.time\n"
        "time.time = lambda: real() + 1000\n"
        "socket.gethostname = lambda: 'lab1'\n"
    )
    code, found = doctor(hosts, *TWO, agent=hosts.agent_with(2, tmp_path))
    assert code == 1 and not found["works"]
    clock, name, keras = complaints(found)
    a, b = f"{NETWORK}.1", f"{NETWORK}.2"
    assert clock.startswith(f"the clock of {b} is ") and clock.endswith(" s ahead")
    assert name.startswith(f"{a} and {b} both call themselves 'lab1'")
    assert keras.startswith("keras differs: ") and f"0.0.1 on {b}" in keras


def test_a_host_that_no_one_can_reach(hosts):
    gone = f"{NETWORK}.99"
    code, found = doctor(hosts, "-H", f"{NETWORK}.1:1,{gone}:1")
    assert code == 1
    (line,) = complaints(found)
    assert line.startswith(f"{gone} cannot be examined: ")


def test_a_network_that_does_not_carry(hosts):
    with hosts.cut(2):
        code, found = doctor(hosts, *TWO)
    assert code == 1 and found["wires"] == []
    (line,) = complaints(found)
    assert line.startswith(f"{NETWORK}.1 has no TCP connection to {NETWORK}.2: ")


def test_traffic_that_goes_another_way_than_it_should(hosts):
    # The last of an option counts: there is no eth1 on these hosts.
    code, found = doctor(hosts, *TWO, "--network-interfaces", "eth1")
    assert code == 1
    (line,) = complaints(found)
    assert line == f"{NETWORK}.1 reaches the other hosts by eth0, not by eth1"
