"""srun, with or without MPI."""

from __future__ import annotations

from collective.environment.base import Launcher
from collective.hosts import slurm


class Slurm(Launcher):
    """``SLURM_PROCID`` etc.; without ``SLURM_STEP_ID`` they are a batch script's."""

    name = "srun"
    needs = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")

    def rank(self) -> int:
        """``SLURM_PROCID``."""
        return self.number("SLURM_PROCID")

    def size(self) -> int:
        """``SLURM_STEP_NUM_TASKS``: a step may be smaller than its allocation."""
        return self.number("SLURM_STEP_NUM_TASKS", self.number("SLURM_NTASKS"))

    def local_rank(self) -> int:
        """``SLURM_LOCALID``."""
        return self.number("SLURM_LOCALID", super().local_rank())

    def local_size(self) -> int:
        """This node's number in ``SLURM_STEP_TASKS_PER_NODE`` (``2(x3),1``)."""
        counts = self._counts()
        node = self.number("SLURM_NODEID", 0)
        return counts[node] if node < len(counts) else self.size()

    def cross(self) -> tuple[int, int]:
        """From ``SLURM_NODEID`` and the number of tasks on each node."""
        counts, local = self._counts(), self.local_rank()
        if "SLURM_NODEID" not in self.variables or not counts:
            return -1, -1
        before = counts[: self.number("SLURM_NODEID")]
        return sum(n > local for n in before), sum(n > local for n in counts)

    def _counts(self) -> list[int]:
        try:
            return slurm.counts(self.variables["SLURM_STEP_TASKS_PER_NODE"])
        except (KeyError, ValueError):
            return []
