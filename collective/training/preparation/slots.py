"""The slots of a sharded optimizer (ZeRO stage 1): each rank stores and updates its piece.

A slot is any variable of an optimizer but scalars: Adam's ``m`` and ``v``, averages of the
weights, sums of gradients. It is cut as soon as it is made, so that no rank ever has all of
them whole.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, 2020; Y. Xu et al., Automatic Cross-Replica Sharding of Weight Update in
Data-Parallel Training, 2020 (arXiv:2004.13336).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from collective.backends import Options
from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.model.variables import optimizers_of
from collective.training.sharding.placing import Placing


def check(backend: Backend, what: str = "--shard-optimizer") -> None:
    """Refuse options for a sum that is not made.

    Args:
        what: The option by which none is made.
    """
    for option in ("algorithm", "transport_dtype", "bucket_bytes"):
        if getattr(backend.options, option) != getattr(Options(), option):
            raise UsageError(
                f"--{option.replace('_', '-')} is for the all-reduce of gradients, and "
                f"{what} has none",
                hint="drop one of the two",
            )


@contextlib.contextmanager
def in_pieces(model: keras.Model, backend: Backend) -> Iterator[None]:
    """Cut the slots of a compiled model's optimizers, and inside those that are made.

    Every rank enters it.

    Raises:
        UsageError: The model, or options of the backend, do not work with it.
    """
    check(backend)
    if backend.size == 1:
        yield
        return
    if model.run_eagerly:
        raise UsageError(
            f"model {model.name!r} has run_eagerly=True, and an optimizer that updates pieces "
            "needs a graph of the step",
            hint="compile it without run_eagerly; or drop --shard-optimizer",
        )
    placing = Placing(backend, shard_optimizer=True, by_map=False)
    slots = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    if placing.cut_slots(slots):
        keras_compat.batch_functions.forget(model)  # which were traced with whole slots
    with placing.making():
        yield
