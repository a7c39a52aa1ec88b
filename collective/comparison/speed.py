"""Speed: the rounds of each backend summarized, and which backend is fastest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timed:
    """The timed runs of one backend at one number of replicas."""

    rates: list[float] = field(default_factory=list)  # samples/s of each round
    # Seconds of each part of a step, in order: medians over the rounds.
    parts: dict[str, float] = field(default_factory=dict)
    memory: int = 0  # peak bytes of rank 0 over all rounds
    failure: str = ""  # why a run failed; empty if every round succeeded
    tail: str = ""  # the last lines of the failed run

    @classmethod
    def of(cls, summaries: Sequence[Mapping[str, Any]]) -> Timed:
        """Summarize rounds: the ``train.py --json`` of each."""
        seconds = [s["seconds_per_step"] for s in summaries]
        return cls(
            [s["samples_per_second"] for s in summaries],
            {part: statistics.median(s[part] for s in seconds) for part in seconds[0]},
            max(s["peak_memory"] for s in summaries),
        )

    @property
    def rate(self) -> float:
        """Return samples per second: the median of the rounds, or 0 without rounds."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def step(self) -> float:
        """Return seconds per step."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Fastest:
    """The backend with the highest median rate."""

    backend: str
    second: str = ""  # the next fastest; empty if there is none
    ahead: float = 0.0  # its lead as a share of the second's rate
    clear: bool = False  # whether it led in each of at least three rounds
    rounds: int = 3

    def sentence(self) -> str:
        """Return a sentence that names the fastest backend."""
        if not self.second:
            return f"{self.backend} is the only backend that was timed."
        by = f"{self.backend} is fastest, {self.ahead:.1%} ahead of {self.second}"
        if self.rounds == 1:
            return f"{by}, in one round: repeat it before you rely on it."
        if self.clear:
            return f"{by}, in every round: more than the noise."
        return f"{by}; that is within the noise of these rounds."


def by_rate(timed: Mapping[str, Timed]) -> list[str]:
    """Return the names, the fastest first."""
    return sorted(timed, key=lambda name: -timed[name].rate)


def fastest(timed: Mapping[str, Timed]) -> Fastest | None:
    """Compare backends whose rounds were interleaved, or return None without any."""
    order = [name for name in by_rate(timed) if timed[name].rates]
    if len(order) < 2:
        return Fastest(order[0]) if order else None
    first, second = (timed[name] for name in order[:2])
    # Compare rounds in pairs: a slow moment of the machine slows both.
    pairs = list(zip(first.rates, second.rates, strict=False))
    clear = len(pairs) >= 3 and all(a > b for a, b in pairs)
    return Fastest(order[0], order[1], first.rate / second.rate - 1, clear, len(pairs))


def bottleneck(name: str, timed: Timed) -> str:
    """Return a sentence about the largest part of a step, with advice."""
    part = max(timed.parts, key=lambda p: timed.parts[p])
    share = timed.parts[part] / (timed.step or 1.0)
    advice = {
        "input": "read or decode the data faster",
        "compute": "communication is not the bottleneck",
        "wait": "one process is slower than the others",
        "all_reduce": "larger batches make it less frequent",
        "update": "look at the optimizer",
    }[part]
    what = {"all_reduce": "the all-reduce", "wait": "waiting for the slowest process"}
    return f"With {name}, {what.get(part, part)} is {share:.0%} of a step: {advice}."
