"""What collectives inside the forward pass cannot be combined with."""

from __future__ import annotations

from typing import Any

import keras

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.prepared import PreparedModel
from collective.training.refusals import refuse
from collective.training.step.plan import StepPlan


def reasons(
    model: keras.Model,
    backend: Backend,
    plan: StepPlan,
    sync_batch_norm: bool,
    cut: bool = False,
) -> tuple[str, ...]:
    """What of a training needs collectives in the forward pass, a few words each.

    Args:
        cut: Whether one replica computes its rows in several pieces.
    """
    # The statistics of one replica's rows are those of the batch.
    whole = backend.replicas == 1 and not backend.elastic and not cut
    needs = {
        "a loss of the whole batch": plan.gather_loss,
        "metrics of the whole batch": plan.gather_metrics,
        "gradients of single look-ups (embedding_gradients='keras')": (
            plan.gather_look_ups
        ),
        "gradients of embeddings that travel as rows": plan.as_rows,
        "synchronized batch normalization": not whole
        and any(
            sync_batch_norm or layer.synchronized
            for layer in keras_compat.batch_norm_layers(model)
        ),
    }
    return tuple(what for what, needed in needs.items() if needed)


def is_possible(prepared: PreparedModel, backend: Backend, **options: Any) -> bool:
    """Whether a step may have collectives in its forward pass; see ``check``."""
    try:
        check(prepared, backend, ("",), **options)
    except UsageError:
        return False
    return prepared.partition is None


def check(
    prepared: PreparedModel,
    backend: Backend,
    coupling: tuple[str, ...],
    *,
    accumulate: int = 1,
    jit_compile: bool = False,
    recompute: bool = False,
) -> None:
    """Refuses what cannot be combined, on every rank alike.

    Args:
        coupling: ``reasons``; nothing is refused where there are none.
    """
    if not coupling:
        return
    what = coupling[0]
    if accumulate > 1:
        raise UsageError(
            f"{what} cannot be computed from micro-batches: each sees a part of the rows",
            hint="drop accumulate (--accumulate)",
        )
    if not backend.synchronous:
        raise UsageError(
            f"{what} needs replicas that share each batch, and with backend "
            f"{backend.name!r} each worker has batches of its own",
            hint="backend='native' or 'mpi'",
        )
    refused = {
        "several replicas in one process": len(backend.local_replicas) > 1,
        "ranks that leave and join (--min-np)": backend.elastic,
        "tensor parallelism": backend.tensor is not None,
        "layers on several devices": prepared.placement is not None,
        "jit_compile": jit_compile,
        "recompute": recompute,
    }
    refuse(
        f"{what} needs collectives inside the forward pass, which do not work with",
        refused,
        hint="a backend with one replica in each process (native, mpi, horovod, "
        "tf-multiworker), without that option",
    )
