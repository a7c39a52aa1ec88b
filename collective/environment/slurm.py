"""srun, Slurm's launcher."""

from __future__ import annotations

from collections.abc import Mapping

from collective.environment.launcher import Launcher, cross_of
from collective.hosts import slurm

# Below the ports that systems assign by themselves: 64 for each job and step.
_FIRST_PORT, _PORTS, _EACH = 20000, 12000, 64


def serves_mpi(variables: Mapping[str, str]) -> bool:
    """Return whether srun gave its tasks PMIx or PMI2, by which MPI connects them."""
    return "PMIX_NAMESPACE" in variables or "PMI_RANK" in variables


class Slurm(Launcher):
    """srun, with or without MPI. Without ``SLURM_STEP_ID``, a batch script runs."""

    name = "srun"
    needs = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID")
    local = ("SLURM_LOCALID", "")

    def size(self) -> int:
        """Return the size of the step, which may be smaller than the allocation's."""
        return self.number("SLURM_STEP_NUM_TASKS", super().size())

    def local_size(self) -> int:
        """Return this node's number in ``SLURM_STEP_TASKS_PER_NODE`` (``2(x3),1``)."""
        counts, node = self._counts(), self.number("SLURM_NODEID", 0)
        return counts[node] if node < len(counts) else self.size()

    def cross(self) -> tuple[int, int]:
        """Count by ``SLURM_NODEID`` and the number of tasks on each node."""
        counts = self._counts()
        if "SLURM_NODEID" not in self.variables or not counts:
            return -1, -1
        return cross_of(counts, self.number("SLURM_NODEID"), self.local_rank())

    def addresses(self) -> list[str]:
        """Derive the addresses from the step's nodes and the job's number."""
        counts, env = self._counts(), self.variables
        try:
            parts = slurm.split(env["SLURM_STEP_NODELIST"])
            nodes = [name for part in parts for name in slurm.expand(part)]
            first = int(env["SLURM_JOB_ID"]) * _EACH + int(env["SLURM_STEP_ID"])
        except (KeyError, ValueError):
            return []
        order = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0].split(",")[0]
        if len(nodes) != len(counts) or order not in ("block", "cyclic"):
            return []
        tasks = [(node, i) for node, n in enumerate(counts) for i in range(n)]
        if order == "cyclic":
            tasks.sort(key=lambda task: task[::-1])
        first %= _PORTS
        return [f"{nodes[node]}:{_FIRST_PORT + first + i}" for node, i in tasks]

    def _counts(self) -> list[int]:
        try:
            return slurm.counts(self.variables["SLURM_STEP_TASKS_PER_NODE"])
        except (KeyError, ValueError):
            return []
