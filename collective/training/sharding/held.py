"""A variable of which this rank holds a part, and what the passes over a mesh make of it.

``HeldPart`` has the part and the stand-ins that are traced: one of the whole shape, and
one for what is left of it behind the pass over each model axis. ``held_in`` finds the
variables of a traced graph that are held so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat.held_parts import StandIn
from collective.training.keras_compat.tensorflow_names import stand_in
from collective.training.partition import pieces
from collective.training.partition.layouts import OWNED, Layout
from collective.training.partition.mesh.layouts import VariableLayout
from collective.training.sharding import alone
from collective.training.sharding.mesh_ranks import MeshRanks

_by_handle: WeakValueDictionary[int, HeldPart] = WeakValueDictionary()
_traces: list[bool] = []  # those that are made now, each inside of the one before


class HeldPart:
    """What holds the part of a variable; see ``keras_compat.held_parts.Holder``.

    Args:
        variable: Whose shape, dtype and path it has.
        value: The whole initial value. Every rank has one, and rank 0's counts.
        before_read: Called before the whole value is gathered.

    Attributes:
        number: The same on every rank; see ``alone``.
        stand_in: A variable of the whole shape, without memory.
        part: This rank's part.
        steps: For each axis of the mesh along which the variable is cut, in the order of
            the passes: the axis, the layout along it, and what stands for the variable
            before and after the pass.
    """

    def __init__(
        self,
        variable: keras.Variable,
        value: tf.Tensor,
        layout: VariableLayout,
        ranks: MeshRanks,
        before_read: Callable[[HeldPart], None],
    ):
        self.path = keras_compat.model.path_of(variable)
        self.shape, self.layout, self.ranks = tuple(value.shape), layout, ranks
        self._before_read = before_read
        part, cuts = ranks.part(ranks.agreed(value), layout)
        shape = self.shape
        chain: list[tuple[str, Layout, Any, Any]] = []
        before: Any
        self.stand_in = before = StandIn(shape, value.dtype, variable.trainable, self)
        for number, (axis, cut) in enumerate(cuts):
            is_last = number == len(cuts) - 1 and not layout.in_pieces
            shape = tuple(
                cut.per_row if i == cut.axis else size for i, size in enumerate(shape)
            )
            behind = None if is_last else stand_in(shape, value.dtype.name)
            chain.append((axis, cut, before, behind))
            before = behind
        if layout.in_pieces:
            part = pieces.cut(part, *ranks.pieces)
            chain.append((ranks.mesh.batch, OWNED, before, None))
        # A slice may share the memory of the whole value: the part is copied.
        self.part = tf.Variable(
            np.array(part), trainable=False, name=variable.name, dtype=value.dtype
        )
        self.steps: list[tuple[str, Layout, tf.Variable, tf.Variable]] = [
            (axis, cut, first, self.part if last is None else last)
            for axis, cut, first, last in chain
        ]
        _by_handle[id(self.stand_in.handle)] = self
        self.number = alone.numbered(self)

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the bytes of the whole variable, and of this rank's part."""
        size = self.part.dtype.size
        return size * int(np.prod(self.shape)), size * int(np.prod(self.part.shape))

    def whole(self) -> tf.Tensor:
        """Return the whole value; every rank calls it.

        Raises:
            UsageError: Gradients are recorded, and none would reach the variable.
        """
        if keras_compat.calls.records_gradients():
            raise UsageError(
                f"{self.path!r} is held in parts by the ranks, and a training loop that "
                "runs eagerly would find no gradient of it",
                hint="model.fit or model.train_on_batch; a loop of its own belongs into "
                "train_step",
            )
        self._before_read(self)
        with alone.using(self, writes=False):
            return self.gather()

    def gather(self) -> tf.Tensor:
        """Return the whole value if no other rank has to be asked to take part."""
        return self.ranks.whole(self.part.value(), self.shape, self.layout)

    def write(self, value: tf.Tensor) -> None:
        """Keep this rank's part of a whole value; every rank calls it, and rank 0's counts."""
        with alone.using(self, writes=True):
            part, _ = self.ranks.part(self.ranks.agreed(value), self.layout)
        if self.layout.in_pieces:
            part = pieces.cut(part, *self.ranks.pieces)
        self.part.assign(np.array(part))

    def traced_handle(self, own: Any) -> Any:
        """Return the stand-in's handle to a function that is partitioned.

        Raises:
            UsageError: Nothing partitions it: it is traced outside of ``tracing``.
        """
        if not is_tracing():
            raise UsageError(
                f"a function of the script reads {self.path!r}, which the ranks hold in "
                "parts: it would find a variable without a value",
                hint="model.fit, evaluate, predict, or train_on_batch; code of its own "
                "belongs into train_step, test_step or predict_step",
            )
        return own


@contextlib.contextmanager
def tracing(*, runs: bool = True) -> Iterator[None]:
    """Trace a function whose variables may be held in parts.

    Args:
        runs: Whether the function will run. If not, variables that wait for their values
            go on waiting.
    """
    _traces.append(runs)
    try:
        yield
    finally:
        _traces.pop()


def is_tracing() -> bool:
    """Return whether a function is traced that is partitioned."""
    return bool(_traces)


def is_searching() -> bool:
    """Return whether a function is traced that never runs."""
    return is_tracing() and not _traces[-1]


def held_in(graph: Any) -> list[HeldPart]:
    """Return the variables that a traced graph uses, and this rank has a part of."""
    found = (_by_handle.get(id(outer)) for outer, _ in graph.captures)
    return [held for held in found if held is not None]


def part_of(variable: Any) -> HeldPart | None:
    """Return what holds this rank's part of a variable, or None if it has it whole."""
    holder = keras_compat.held_parts.holder_of(variable)
    return holder if isinstance(holder, HeldPart) else None


def is_held(variable: Any) -> bool:
    """Return whether ranks have parts of a variable."""
    return part_of(variable) is not None


def backend_of_rows(model: keras.Model, backend: Backend) -> Backend:
    """Return the backend among the ranks that share the rows of a model's batches."""
    for variable in model.variables:
        holder = part_of(variable)
        if holder is not None and holder.layout.cut:
            along: Backend = holder.ranks.along[holder.ranks.mesh.batch]
            return along
    return backend


def own_value(variable: keras.Variable) -> tf.Tensor:
    """Return the value of a variable, or of this rank's part of it."""
    holder = part_of(variable)
    return tf.convert_to_tensor(variable.value if holder is None else holder.part)


def gathered(variables: Iterable[keras.Variable], keeps: bool) -> dict[int, np.ndarray]:
    """Return the whole values of those that are held in parts; every rank calls it.

    Args:
        keeps: Whether this rank wants them.

    Returns:
        By the ``id`` of the variable; empty if they are not wanted.
    """
    found = {}
    for variable in variables:
        holder = part_of(variable)
        if holder is not None:
            whole = holder.gather()
            if keeps:
                found[id(variable)] = np.asarray(whole)
    return found


def check_whole(model: keras.Model, why: str, hint: str) -> None:
    """Refuse a model whose variables are held in parts.

    Args:
        why: What the model does, which needs whole variables.

    Raises:
        UsageError: A variable of it is held in parts.
    """
    held = next((v for v in model.variables if is_held(v)), None)
    if held is not None:
        raise UsageError(
            f"model {model.name!r} {why}, and {held.path!r} is held in parts by the ranks",
            hint=hint,
        )
