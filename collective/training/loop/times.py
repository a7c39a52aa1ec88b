"""How the time of each step divides into its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from collective.backends.base import Backend
from collective.training.process.object_collectives import gather, gather_few

PARTS = ("input", "compute", "wait", "all_reduce", "update")
# The waiting is known for so many steps: each rank sends the others one number a step.
LAST = 1000


@dataclass
class Timing:
    """Seconds of each step of a training, in order.

    Attributes:
        input: Waiting for the next batch.
        step: In the step.
        all_reduce: The part of it from the last local sum to the last global one.
        update: The part of it from the last global sum to the end of the step.
        wait: Of ``all_reduce``, until the slowest process had its local sums, too. Zero
            for replicas within one process, and before the last ``LAST`` steps.
        started: When, by this host's clock, the local sums were ready.
        rows: Rows of each global batch.

    The first step of each batch size is excluded from every figure: it traces graphs,
    allocates memory and, with XLA, compiles.
    """

    input: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    all_reduce: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def _counted(self, values: Sequence[float]) -> np.ndarray:
        first = {self.rows.index(size) for size in set(self.rows)}
        keep = [i for i in range(len(self.rows)) if i not in first]
        return np.asarray(values, np.float64)[keep or slice(None)]

    @property
    def samples_per_second(self) -> float:
        """Return the rows per second of training, without validation."""
        seconds = self.seconds().sum()
        rows = self._counted(self.rows).sum()
        return float(rows / seconds) if seconds > 0 else 0.0

    def seconds(self) -> np.ndarray:
        """Return the seconds of every counted step, including the wait for input."""
        return self._counted(self.input) + self._counted(self.step)

    def per_step(self) -> dict[str, float]:
        """Return the seconds of a step's parts, by the names in ``PARTS``.

        These are means over the middle half of the steps by duration: unlike medians
        they add up to a step, and outliers do not count.
        """
        if not self.rows:
            return dict.fromkeys(PARTS, 0.0)
        step, reduce = self._counted(self.step), self._counted(self.all_reduce)
        update = self._counted(self.update)
        wait = self._counted(self.wait or [0.0] * len(self.rows))
        parts = {
            "input": self._counted(self.input),
            "compute": step - reduce - update,
            "wait": wait,
            "all_reduce": reduce - wait,
            "update": update,
        }
        order = np.argsort(self.seconds())
        middle = order[len(order) // 4 : len(order) - len(order) // 4]
        return {name: float(parts[name][middle].mean()) for name in PARTS}

    def compute_wait(self, backend: Backend) -> None:
        """Fill in ``wait`` from when every rank started. Every rank calls it.

        Between hosts it includes the difference of their clocks.
        """
        self.wait = [0.0] * len(self.started)
        if backend.size == 1:
            return
        # After a rank has died, ranks may differ by one in the steps they finished.
        count = min(LAST, int(gather_few(backend, [len(self.started)]).min()))
        if not count:
            return
        mine = np.asarray(self.started[-count:])
        slowest = gather(backend, mine).max(axis=0)
        spans = np.asarray(self.all_reduce[-count:])
        waits = np.clip(slowest - mine, 0, spans)
        self.wait[-count:] = waits.tolist()
