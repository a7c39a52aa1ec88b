"""Our doctor on several hosts: whether they reach each other, and which errors it finds."""

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


def test_three_hosts_that_reach_each_other(hosts):
    names = [f"{NETWORK}.{i}" for i in (1, 2, 3)]
    code, found = doctor(hosts, "-H", ",".join(f"{name}:1" for name in names))
    assert code == 0 and found["works"], found["findings"]
    assert [m["host"] for m in found["hosts"]] == ["lab1", "lab2", "lab3"]
    assert [m["cut_off"] for m in found["hosts"]] == ["", "", ""]


def test_what_is_wrong_with_another_host(hosts, tmp_path):
    """The other host differs in its keras, its clock and its name."""
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
    assert code == 1
    (line,) = complaints(found)
    assert line.startswith(f"{NETWORK}.2 cannot reach this host: no connection ")
