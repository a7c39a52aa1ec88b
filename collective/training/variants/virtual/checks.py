"""What virtual replicas cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.refusals import refuse
from collective.training.variants.virtual.pieces import VirtualReplicas

HINT = "drop it, or virtual_replicas (--virtual-replicas)"


def check_count(count: int | None, backend: Backend) -> VirtualReplicas | None:
    """The virtual replicas that were asked for."""
    if count is None:
        return None
    refused = {
        f"backend {backend.name!r}: its workers do not share a batch": (
            not backend.synchronous
        ),
        "tensor parallelism: the sums of its parts depend on their number": (
            backend.tensor is not None
        ),
        "layers on several devices (model_parallel)": bool(backend.stages),
        f"gradients that travel in {backend.rounds_to} (transport_dtype)": (
            backend.rounds_to is not None
        ),
    }
    _refuse(refused)
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


def check_batch(virtual: VirtualReplicas, inputs: Input | Batches) -> None:
    """Refuses a global batch with fewer rows than there are virtual replicas."""
    rows = (
        inputs.batch_size if isinstance(inputs, Batches) else inputs.global_batch_size
    )
    if rows is not None and rows < virtual.count:
        raise UsageError(
            f"a global batch of {rows} rows cannot be cut into {virtual.count} virtual "
            "replicas",
            hint=f"--global-batch-size {virtual.count} or more, or --virtual-replicas "
            f"{rows} or fewer",
        )


def check_options(own_step: bool, ledger: Any) -> None:
    """Refuses options of ``fit`` by which the bits would depend on the ranks."""
    own = "own_step: a train_step of the model's own, which sums when it applies"
    _refuse({own: own_step, "ledger: it has the rows of each replica": bool(ledger)})


def check_coupling(reasons: Sequence[str]) -> None:
    """Refuses a forward pass that needs the rows of other pieces."""
    _refuse(
        {f"{why}: a virtual replica sees its own rows only": True for why in reasons}
    )


def _refuse(refused: Mapping[str, bool]) -> None:
    refuse("virtual replicas cannot be combined with", refused, hint=HINT)
