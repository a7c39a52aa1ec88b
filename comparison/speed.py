"""How fast: what the rounds of one backend say together, and who was fastest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Bytes at which the all-reduce alone is timed: 4 B to 64 MiB.
MESSAGE_SIZES = tuple(4 * 16**i for i in range(7))


@dataclass
class Timed:
    """The timed runs of one backend at one number of replicas.

    Attributes:
        rates: Samples per second of each round, in order.
        parts: Seconds of a step's parts, in their order: medians over the rounds.
        memory: Bytes; most that rank 0 held in any round.
        gradient_bytes: What one all-reduce sums, about.
        failure: Why there is nothing; empty when all rounds went well.
        tail: The last lines of the run that failed.
    """

    rates: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    memory: int = 0
    gradient_bytes: int = 0
    failure: str = ""
    tail: str = ""

    @classmethod
    def of(cls, summaries: Sequence[Mapping[str, Any]]) -> Timed:
        """Sums up rounds.

        Args:
            summaries: What ``train.py --json`` wrote in each.
        """
        width = 8 if summaries[0]["options"]["precision"] == "float64" else 4
        return cls(
            [s["samples_per_second"] for s in summaries],
            {
                part: statistics.median(s["seconds_per_step"][part] for s in summaries)
                for part in summaries[0]["seconds_per_step"]
            },
            max(s["peak_memory"] for s in summaries),
            width * summaries[0]["parameters"],
        )

    @property
    def rate(self) -> float:
        """Samples per second: the median of the rounds; 0 where there is none."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


@dataclass
class Auto:
    """What ``--backend auto`` took, launched with so many ranks.

    Attributes:
        backend: Its choice; empty where the run failed.
        predicted: By backend that it chose from: seconds of a step's all-reduce.
        failure: Why there is no choice.
    """

    backend: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    def behind(self, timed: Mapping[str, Timed]) -> tuple[str, float]:
        """The fastest of those it chose from, and how far the choice is behind it.

        Args:
            timed: By backend, at that number of ranks.
        """
        among = {n: timed[n].rate for n in self.predicted if n in timed}
        best = max(among, key=lambda n: among[n], default=self.backend)
        if not among.get(self.backend):
            return best, 0.0
        return best, 1 - among[self.backend] / among[best]

    def sentence(self, timed: Mapping[str, Timed]) -> str:
        """In words."""
        if self.failure:
            return f"auto {self.failure}."
        if not self.predicted:
            return f"auto takes {self.backend}, without measuring."
        told = ", ".join(f"{n} {1e3 * s:.3g} ms" for n, s in self.predicted.items())
        best, behind = self.behind(timed)
        how = "the fastest of these"
        if best != self.backend:
            how = f"{behind:.1%} behind {best}, the fastest of these"
        return f"auto takes {self.backend}, {how} (predicted all-reduce: {told})."


@dataclass(frozen=True)
class Fastest:
    """Who was fastest.

    Attributes:
        backend: The one with the highest median.
        second: The next; empty where there is none.
        ahead: By how much of the second's rate.
        clear: Whether it was ahead in every one of at least three rounds.
    """

    backend: str
    second: str = ""
    ahead: float = 0.0
    clear: bool = False

    def sentence(self) -> str:
        """In words."""
        if not self.second:
            return f"{self.backend} is the only one that was timed."
        by = f"{self.backend} is fastest, {self.ahead:.1%} ahead of {self.second}"
        if self.clear:
            return f"{by}, in every round: more than the noise."
        return f"{by}; that is within the noise of these rounds."


def fastest(timed: Mapping[str, Timed]) -> Fastest | None:
    """Compares backends whose rounds were interleaved.

    Args:
        timed: By backend, at one number of replicas.

    Returns:
        None where nothing was timed.
    """
    order = sorted(
        (name for name in timed if timed[name].rates), key=lambda n: -timed[n].rate
    )
    if not order:
        return None
    if len(order) == 1:
        return Fastest(order[0])
    first, second = (timed[name] for name in order[:2])
    # Rounds are compared in pairs: what slows the machine down slows both.
    pairs = list(zip(first.rates, second.rates, strict=False))
    clear = len(pairs) >= 3 and all(a > b for a, b in pairs)
    return Fastest(order[0], order[1], first.rate / second.rate - 1, clear)


def bottleneck(name: str, timed: Timed) -> str:
    """Names the largest part of a step, and what to do about it."""
    part = max(timed.parts, key=lambda p: timed.parts[p])
    share = timed.parts[part] / (timed.step or 1.0)
    advice = {
        "input": "read or decode the data faster",
        "compute": "the sum is not the bottleneck",
        "wait": "one process is slower than the others",
        "all_reduce": "larger batches or --accumulate make it rarer",
        "update": "the optimizer's update is what to look at",
    }[part]
    what = {"all_reduce": "the all-reduce", "wait": "waiting for the slowest process"}
    return f"With {name}, {what.get(part, part)} is {share:.0%} of a step: {advice}."
