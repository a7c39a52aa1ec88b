"""A change of the ranks of an elastic job, as the user is told of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A change of the job's ranks."""

    # The former number of each rank, by its new one; -1 for one that joined.
    former: Sequence[int]
    size: int  # the former number of ranks
    noticed: float  # the time of notice, in seconds of ``time.perf_counter``
    # Former ranks that have left by themselves; all other missing ranks died.
    left: Sequence[int] = ()

    @property
    def joined(self) -> int:
        """Return the number of new ranks."""
        return list(self.former).count(-1)

    def print(self, step: int | None) -> None:
        """Print the ranks that are gone and that have joined.

        Args:
            step: The next step; None if no training runs.
        """
        died = set(range(self.size)) - set(self.former) - set(self.left)
        parts = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} of "
            f"{self.size} {what}"
            for ranks, what in ((died, "died"), (self.left, "left"))
            if ranks
        ]
        if self.joined:
            parts.append(f"{self.joined} joined")
        parts = parts or ["a rank that was to join is gone"]
        ranks = len(self.former)
        where = "" if step is None else f" from step {step}"
        print(
            f"collective: {', '.join(parts)}; {ranks} "
            f"rank{'s continue' if ranks > 1 else ' continues'}{where} after "
            f"{time.perf_counter() - self.noticed:.2f} s",
            file=sys.stderr,
            flush=True,
        )
