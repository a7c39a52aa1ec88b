"""srun, Slurm's launcher."""

from __future__ import annotations

from collective.environment.launcher import Launcher, cross_of
from collective.hosts import slurm


class Slurm(Launcher):
    """srun, with or without MPI. Without ``SLURM_STEP_ID`` it is a batch script's."""

    name = "srun"
    needs = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")
    local = ("SLURM_LOCALID", "")

    def size(self) -> int:
        """A step may be smaller than its allocation."""
        return self.number("SLURM_STEP_NUM_TASKS", super().size())

    def local_size(self) -> int:
        """This node's number in ``SLURM_STEP_TASKS_PER_NODE`` (``2(x3),1``)."""
        counts, node = self._counts(), self.number("SLURM_NODEID", 0)
        return counts[node] if node < len(counts) else self.size()

    def cross(self) -> tuple[int, int]:
        """From ``SLURM_NODEID`` and the number of tasks on each node."""
        counts = self._counts()
        if "SLURM_NODEID" not in self.variables or not counts:
            return -1, -1
        return cross_of(counts, self.number("SLURM_NODEID"), self.local_rank())

    def _counts(self) -> list[int]:
        try:
            return slurm.counts(self.variables["SLURM_STEP_TASKS_PER_NODE"])
        except (KeyError, ValueError):
            return []
