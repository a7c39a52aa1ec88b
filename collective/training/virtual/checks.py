"""Numbers of virtual replicas that cannot be."""

from __future__ import annotations

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.virtual.pieces import VirtualReplicas


def check_count(count: int | None, backend: Backend) -> VirtualReplicas | None:
    """Return the virtual replicas that were asked for."""
    if count is None:
        return None
    if count < 1:
        raise UsageError(
            f"virtual_replicas is {count}, and there must be one at least",
            hint=f"--virtual-replicas {backend.most_replicas}",
        )
    if count < backend.most_replicas:
        raise UsageError(
            f"{count} virtual replicas cannot be shared by {backend.most_replicas} "
            "replicas: each holds one at least",
            hint=f"--virtual-replicas {backend.most_replicas} or more, or -np {count}",
        )
    return VirtualReplicas(count)


def check_rows(virtual: VirtualReplicas, rows: int | None) -> None:
    """Refuse a global batch of fewer rows than there are virtual replicas.

    Raises:
        UsageError: It has fewer.
    """
    if rows is not None and rows < virtual.count:
        raise UsageError(
            f"a global batch of {rows} rows cannot be cut into {virtual.count} virtual "
            "replicas",
            hint=f"--global-batch-size {virtual.count} or more, or --virtual-replicas "
            f"{rows} or fewer",
        )
