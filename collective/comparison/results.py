"""The results of a comparison: one object, which ``--json`` writes.

``docs/reference/results.schema.json`` is its JSON Schema.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass, field
from typing import Any

import psutil

from collective import json_file
from collective.comparison.equality import Verdict
from collective.comparison.speed import Timed
from collective.launch.versions import installed

SCHEMA = 1
_LOOK_SECONDS = 1.0
_BUSY = 0.15  # share of the cores from which on times say little


@dataclass
class EqualityProof:
    """The equality test in one precision; results by backend."""

    reference: str  # the backend with which every other is compared
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    # Why a run failed, and its last lines.
    failures: dict[str, list[str]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)  # of each step


@dataclass
class Results:
    """Everything that a comparison found, in seconds, bytes and samples per second.

    Numbers of replicas and of bytes are strings, because keys of JSON are strings.
    """

    options: dict[str, Any]  # of compare.py, and those passed on to train.py
    left_out: dict[str, str] = field(default_factory=dict)  # the reason, by backend
    equal: dict[str, EqualityProof] = field(default_factory=dict)  # by precision
    # By number of replicas, then by backend. "one share" is one process with the cores
    # of one of these replicas.
    fast: dict[str, dict[str, Timed]] = field(default_factory=dict)
    finished: bool = False  # whether every planned run was made
    machine: dict[str, Any] = field(default_factory=lambda: _machine())
    versions: dict[str, str] = field(default_factory=installed)

    @property
    def all_equal(self) -> bool:
        """Return whether every compared backend trained the same model."""
        proofs = self.equal.values()
        return all(v.equal for proof in proofs for v in proof.verdicts.values())

    @property
    def failed(self) -> bool:
        """Return whether any run failed."""
        return any(proof.failures for proof in self.equal.values()) or any(
            one.failure for of in self.fast.values() for one in of.values()
        )

    @property
    def busy(self) -> str:
        """Say in a few words that the machine had other work; '' if it had little."""
        share = self.machine.get("busy", 0.0)
        return f"other programs used {share:.0%} of the cores" if share > _BUSY else ""

    def look_at_machine(self) -> None:
        """Note how busy other programs keep the cores; called while none of our runs is."""
        cores = os.sched_getaffinity(0)
        used = psutil.cpu_percent(_LOOK_SECONDS, percpu=True)
        share = sum(used[i] for i in cores if i < len(used)) / (100 * len(cores))
        self.machine["busy"] = max(share, self.machine.get("busy", 0.0))

    @property
    def verdict(self) -> str:
        """Return the result of the comparison in one sentence."""
        if not self.finished:
            return "Interrupted: only the runs that had finished are shown."
        if not self.all_equal:
            return "Not every backend trained the same model."
        if self.failed:
            return "Some runs failed."
        if not self.equal:
            return "Nothing was compared for equality."
        return "Every compared backend trained the same model."

    def write(self, path: str) -> None:
        """Write the file; raise a CollectiveError if that fails."""
        json_file.write_json(path, {"schema": SCHEMA, **dataclasses.asdict(self)})


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
    }
