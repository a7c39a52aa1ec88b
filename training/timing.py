"""Where the time of the steps went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Timing:
    """Seconds of each step of a training, in the order of the steps.

    Attributes:
        input: Waiting for the next batch.
        step: In the step, all-reduce included.
        all_reduce: Of that, from the last local sum to the last global one, waiting
            for the slowest replica included.
        rows: Rows of each global batch.

    The first step of each batch size is left out of all figures: it builds graphs,
    allocates memory and, with XLA, compiles.
    """

    input: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    all_reduce: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def _counted(self, values: Sequence[float]) -> np.ndarray:
        first = {self.rows.index(size) for size in set(self.rows)}
        keep = [i for i in range(len(self.rows)) if i not in first]
        return np.asarray(values, np.float64)[keep or slice(None)]

    @property
    def samples_per_second(self) -> float:
        """Rows over seconds; validation is not counted."""
        seconds = self._counted(self.input).sum() + self._counted(self.step).sum()
        rows = self._counted(self.rows).sum()
        return float(rows / seconds) if seconds > 0 else 0.0

    def per_step(self) -> dict[str, float]:
        """Median seconds of a step's parts: ``input, compute, all_reduce``."""
        step, reduce = self._counted(self.step), self._counted(self.all_reduce)
        if not len(step):
            return {"input": 0.0, "compute": 0.0, "all_reduce": 0.0}
        return {
            "input": float(np.median(self._counted(self.input))),
            "compute": float(np.median(step - reduce)),
            "all_reduce": float(np.median(reduce)),
        }
