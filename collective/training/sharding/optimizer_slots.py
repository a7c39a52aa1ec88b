"""The slots of a sharded optimizer (ZeRO stage 1): each rank stores and updates its piece.

A slot is any variable of an optimizer but scalars: Adam's ``m`` and ``v``, averages of the
weights, sums of gradients. It is cut as soon as it is made, so that no rank ever has all of
them whole. The step is traced with stand-ins: handles of whole shape, behind which there is
no memory. The partition then reads and writes this rank's pieces in their place.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, 2020; Y. Xu et al., Automatic Cross-Replica Sharding of Weight Update in
Data-Parallel Training, 2020 (arXiv:2004.13336).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras

from collective.backends import Options
from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat.tensorflow_names import stand_in
from collective.training.partition.layouts import OWNED
from collective.training.partition.partition import Placed
from collective.training.sharding.shards import FlatShard, Gather
from collective.training.sharding.whole import ShardedVariables


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


class ShardedSlots(ShardedVariables):
    """The slots of optimizers, of which this rank has its pieces.

    It keeps no reference to the model (``collective.training.model.prepared`` finds it by the
    model).

    Args:
        optimizers: Built inside of ``sharded``.
        cut: How each slot is cut, by its ``id``.
    """

    def __init__(
        self,
        optimizers: Sequence[keras.Optimizer],
        backend: Backend,
        cut: Mapping[int, FlatShard],
    ):
        slots = [v for optimizer in optimizers for v in optimizer.variables]
        super().__init__(slots, cut, backend)
        # What the step is traced with, by slot.
        self._stand_ins = {
            id(v): stand_in(cut[id(v)].shape, v.dtype) for v in self._sharded
        }

    @contextlib.contextmanager
    def stood_in(self) -> Iterator[None]:
        """Inside, slots are handles of whole shape, to trace what reads and writes them."""
        shapes = [(v, self._shards[id(v)].shape) for v in self._sharded]
        values = [self._stand_ins[id(v)] for v in self._sharded]
        with keras_compat.optimizers.replace_shapes(shapes, values):
            yield

    @property
    def placed(self) -> dict[int, Placed]:
        """Return where this rank's pieces are, by the ``id`` of the stand-in's handle."""
        handles = {
            id(v): keras_compat.model.tf_variable(v).handle for v in self._sharded
        }
        return {
            id(self._stand_ins[key].handle): Placed(OWNED, [handle])
            for key, handle in handles.items()
        }

    def broadcast_shards(self) -> None:
        """No two ranks have the same piece."""


@contextlib.contextmanager
def sharded(
    optimizers: Sequence[keras.Optimizer], backend: Backend
) -> Iterator[Callable[[], ShardedSlots]]:
    """Inside, slots are cut as soon as an optimizer makes them.

    Yields:
        What makes the record of them, to be called afterwards.
    """
    cut: dict[int, FlatShard] = {}
    gather = Gather(backend)

    def leave_piece(variable: keras.Variable) -> None:
        if len(variable.shape):
            cut[id(variable)] = shard = FlatShard(variable.shape, gather)
            keras_compat.optimizers.replace_value(variable, shard.cut(variable.value))

    def record() -> ShardedSlots:
        made = [v for optimizer in optimizers for v in optimizer.variables]
        with backend.scope():
            for variable in made:
                if id(variable) not in cut:  # of an optimizer within an optimizer
                    leave_piece(variable)
        return ShardedSlots(optimizers, backend, cut)

    before = [
        v for optimizer in optimizers for v in optimizer.variables if len(v.shape)
    ]
    if before:  # of an optimizer with a past, which rank 0 alone may know
        backend.broadcast(before)
    with (
        backend.scope(),
        keras_compat.optimizers.variables_seen(optimizers, leave_piece),
    ):
        for variable in before:
            leave_piece(variable)
        yield record
