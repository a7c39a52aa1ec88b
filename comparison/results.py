"""What a comparison found: one object, written as ``results.json``.

``docs/reference/results.schema.json`` is its JSON Schema.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from collective.comparison.equality import Verdict
from collective.comparison.speed import Auto, Timed
from collective.launch.versions import installed

SCHEMA = 1


@dataclass
class Proof:
    """The verdicts in one precision.

    Attributes:
        reference: The backend the others are compared with.
        because: Why not ``single``; empty where it is.
        verdicts: By backend.
        failures: By backend: why there is no verdict, and its last lines.
        losses: By backend: the loss of each step.
    """

    reference: str
    because: str = ""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Learned:
    """What a training had learned by when; lists have one entry for each epoch.

    Attributes:
        samples: Rows trained on so far.
        loss, accuracy: Over the epoch; no accuracy where the model tells none.
        test: Loss and metrics on the test data, at the end.
        failure: Why there is nothing.
    """

    samples: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    test: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def of(cls, summary: dict[str, Any]) -> Learned:
        """From what ``train.py --json`` wrote."""
        rows, size = summary["rows"], summary["options"]["global_batch_size"]
        per_epoch, history = -(-rows // size), summary["history"]
        samples = []
        for epoch in range(len(history["loss"])):
            steps = min(summary["steps"] - epoch * per_epoch, per_epoch)
            samples.append(epoch * rows + min(steps * size, rows))
        accuracy = history.get("accuracy", [])
        return cls(samples, history["loss"], accuracy, summary["test"])


@dataclass
class Results:
    """Everything. Times are seconds, sizes bytes, rates samples per second.

    Attributes:
        options: ``compare.py``'s options and those handed on to ``train.py``.
        left_out: By backend: why it was not run, and what to type.
        equal: By precision.
        learned: By backend, where one is asynchronous: what the training learned by
            when; its model is another one each time.
        fast: By number of replicas, as text, then by backend. ``one share`` is one
            process with the cores that each of that many gets.
        auto: By number of ranks, as text: what ``--backend auto`` takes.
        allreduce: By backend, then by bytes, as text: seconds.
        floor: By bytes, as text: least seconds of an all-reduce on this host.
        finished: Whether it came to its end.
        machine, versions: Where, and with what.
    """

    options: dict[str, Any]
    left_out: dict[str, str] = field(default_factory=dict)
    equal: dict[str, Proof] = field(default_factory=dict)
    learned: dict[str, Learned] = field(default_factory=dict)
    fast: dict[str, dict[str, Timed]] = field(default_factory=dict)
    auto: dict[str, Auto] = field(default_factory=dict)
    allreduce: dict[str, dict[str, float]] = field(default_factory=dict)
    floor: dict[str, float] = field(default_factory=dict)
    finished: bool = False
    machine: dict[str, Any] = field(default_factory=lambda: _machine())
    versions: dict[str, str] = field(default_factory=installed)

    @property
    def all_equal(self) -> bool:
        """Whether every backend that ran trained the same model."""
        return all(
            verdict.equal
            for proof in self.equal.values()
            for verdict in proof.verdicts.values()
        )

    @property
    def failed(self) -> bool:
        """Whether any run went wrong."""
        return (
            any(proof.failures for proof in self.equal.values())
            or any(one.failure for of in self.fast.values() for one in of.values())
            or any(learned.failure for learned in self.learned.values())
        )

    def write(self, path: Path) -> None:
        """Writes the file; numbers that are not finite become null."""
        told = {"schema": SCHEMA, **_plain(dataclasses.asdict(self))}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(told, indent=1, allow_nan=False) + "\n")
        part.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
    }
