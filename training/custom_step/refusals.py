"""What a user's own step cannot be combined with."""

from __future__ import annotations

import keras

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat

#: What remains for a step that cannot be run here.
DROP_IN = (
    "train it by Keras' own fit with the drop-in: import collective.tensorflow.keras as "
    "hvd; hvd.init(); optimizer = hvd.DistributedOptimizer(optimizer)"
)


def has_own_step(model: keras.Model) -> bool:
    """Whether the user's class replaces ``train_step``."""
    return keras_compat.overrides(model, "train_step")


def check_options(
    model: keras.Model,
    backend: Backend,
    *,
    accumulate: int = 1,
    jit_compile: bool = False,
    recompute: bool = False,
    shard_optimizer: bool = False,
) -> None:
    """Refuses what cannot be done with a user's own step.

    Raises:
        UsageError: Says what.
    """
    refused = {
        "accumulate: a train_step takes its batch in one piece": accumulate > 1,
        "jit_compile: sums over ranks are no part of a compiled program": jit_compile,
        "recompute": recompute,
        "shard_optimizer": shard_optimizer,
        "tensor parallelism": backend.tensor is not None,
        "layers on several devices": bool(backend.stages),
        "an elastic job: the updates of a train_step cannot be undone when a rank "
        "dies between two of them": backend.elastic,
        f"backend {backend.name!r}": not backend.synchronous or _in_threads(backend),
    }
    for what, asked in refused.items():
        if asked:
            raise UsageError(
                f"model {model.name!r} has a train_step of its own, which cannot be "
                f"combined with {what}",
                hint=f"leave that out, with --backend native or mpi; or {DROP_IN}",
            )


def _in_threads(backend: Backend) -> bool:
    """Whether a strategy of TensorFlow's calls the step.

    It forbids a train_step to write variables whose replicas differ.
    """
    return getattr(backend, "strategy", None) is not None and backend.most_replicas > 1
