"""A cluster in words: ``hosts=64,slots=8,link=25gbit,latency=5us``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from collective.comparison.prediction.simulator import Cluster, Wire
from collective.errors import UsageError

EXAMPLE = "--predict hosts=64,slots=8,link=25gbit,latency=5us"
BITS = {"gbit": 1e9, "mbit": 1e6}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
KEYS = {
    "hosts": "how many, two or more",
    "slots": "ranks on each (default: 1)",
    "link": "of each host, as 25gbit",
    "latency": "one way, as 5us (default: 5us)",
    "message": "of a core at each end of a message (default: 1us)",
    "step": "of one device alone, as 250ms (default: published, or measured here)",
    "rows": "of a device, where the step is measured here (default: 32)",
    "device": "gpu or cpu (default: gpu)",
}


@dataclass(frozen=True)
class Asked:
    """What ``--predict`` asks for."""

    cluster: Cluster
    seconds: float | None = None  # of a step on one device
    rows: int = 32
    gpu: bool = True


def parse(text: str) -> Asked:
    """Reads the words of ``--predict``; a UsageError if one is wrong or missing."""
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    for key in given:
        if key not in KEYS:
            raise _wrong(f"there is no {key!r}")
    for key in ("hosts", "link"):
        if key not in given:
            raise _wrong(f"{key}= is missing: {KEYS[key]}")
    wire = Wire(
        _number(given, "link", BITS) / 8,
        latency=_number(given, "latency", SECONDS, "5us"),
        per_message=_number(given, "message", SECONDS, "1us"),
    )
    hosts, slots = _count(given, "hosts", 2), _count(given, "slots", 1)
    device = given.get("device", "gpu")
    if device not in ("gpu", "cpu"):
        raise _wrong(f"device={device}: {KEYS['device']}")
    seconds = _number(given, "step", SECONDS) if "step" in given else None
    cluster = Cluster(hosts, slots, wire)
    return Asked(cluster, seconds, _count(given, "rows", 1, "32"), device == "gpu")


def _wrong(what: str) -> UsageError:
    return UsageError(f"--predict: {what}", hint=EXAMPLE)


def _number(
    given: dict[str, str], key: str, units: dict[str, float], default: str = ""
) -> float:
    text = given.get(key, default)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if not found or found[2] not in units or not float(found[1]):
        raise _wrong(f"{key}={text}: {KEYS[key]}")
    return float(found[1]) * units[found[2]]


def _count(given: dict[str, str], key: str, least: int, default: str = "1") -> int:
    text = given.get(key, default)
    if not text.isdecimal() or int(text) < least:
        raise _wrong(f"{key}={text}: {KEYS[key]}")
    return int(text)
