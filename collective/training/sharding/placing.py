"""Which variables are cut, and how: each as soon as it is made.

A variable is laid out by the ``LayoutMap`` of the distribution that is set when it is made,
as Keras lays it out on JAX, and by the options ``shard_weights`` and ``shard_optimizer``. A
slot of an optimizer lies as its weight does. So no rank ever has a whole model in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.partition.mesh.layouts import (
    Layouts,
    Mesh,
    VariableLayout,
    gates_of,
    lay_out,
    wanted_for,
)
from collective.training.sharding import alone
from collective.training.sharding.held import (
    HeldPart,
    backend_of_rows,
    is_held,
    is_searching,
    is_tracing,
    part_of,
)
from collective.training.sharding.mesh_ranks import MeshRanks
from collective.training.sharding.waiting import Owner, Waiting, waits

ROWS = "batch"  # the axis of a job whose script names none


@dataclass
class Placing:
    """Lays out the variables that a script makes.

    Args:
        backend: The backend of all ranks of the job.
        shard_weights: Whether weights and slots are in pieces over the ranks that share
            a batch.
        shard_optimizer: Whether slots are.
        by_map: Whether the layout map of the current distribution counts.
        mesh: Of the ranks, where no map has one; by default all of them share a batch.

    Attributes:
        before_read: Called before a whole value is gathered, of the variable.
        kept_whole: Why axes stay whole that a map would cut, by the path of the variable.
        waits: Whether variables that are made wait for their values.
    """

    backend: Backend
    shard_weights: bool = False
    shard_optimizer: bool = False
    by_map: bool = True
    mesh: Mesh = field(default_factory=lambda: Mesh({}, ROWS))
    before_read: list[Callable[[HeldPart], None]] = field(default_factory=list)
    kept_whole: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._owner: ContextVar[Owner | None] = ContextVar("owner", default=None)
        self._deferred: dict[int, Owner] = {}  # by id: not initialized when it was made
        self._ranks: dict[Any, MeshRanks] = {}
        self._held: WeakSet[HeldPart] = WeakSet()
        self._has_held = False  # or had some: the same on every rank
        self._used: list[Any] = []  # layouts of a map that variables have got
        self.waits = False
        if not self.mesh.sizes:
            self.mesh = Mesh({ROWS: self.backend.size}, ROWS)

    def unused_patterns(self) -> list[str]:
        """Return the patterns of the current map that no variable has matched so far."""
        distribution = keras_compat.distribution.current_distribution()
        layout_map = keras_compat.distribution.layout_map_of(distribution) or {}
        used = {id(layout) for layout in self._used}
        return [key for key, layout in layout_map.items() if id(layout) not in used]

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Inside, variables are cut when they are initialized."""
        with (
            keras_compat.held_parts.initialized_by(self._initialize),
            keras_compat.held_parts.owners_seen(self._of_layer, self._of_optimizer),
        ):
            yield

    @contextlib.contextmanager
    def _of_layer(self, layer: Any) -> Iterator[Callable[[Any], None]]:
        owner = Owner("weight", gates_of(layer))
        token = self._owner.set(owner)

        def note(variable: Any) -> None:
            if keras_compat.held_parts.is_deferred(variable):
                self._deferred[id(variable)] = owner

        try:
            yield note
        finally:
            self._owner.reset(token)

    @contextlib.contextmanager
    def _of_optimizer(self, weight: Any) -> Iterator[None]:
        around = self._owner.get()
        if around is not None and around.kind == "slot" and weight is None:
            yield  # ``add_variable`` of ``add_variable_from_reference``
            return
        token = self._owner.set(Owner("slot", weight=weight))
        try:
            yield
        finally:
            self._owner.reset(token)

    def _initialize(self, variable: Any, value: Any) -> bool:
        owner = self._deferred.pop(id(variable), None) or self._owner.get()
        if alone.is_alone():  # of a callback, on rank 0
            return False
        if tf.distribute.has_strategy():  # it is a copy on each device
            return False
        with tf.init_scope():
            shape = keras_compat.held_parts.shape_of(variable, value)
            runs = is_tracing() and not is_searching()  # what is traced now
            if self.waits and owner is not None and not runs:
                Waiting(variable, shape, value, owner)
                return True
            found = self.layout(variable, shape, owner)
            if found is None:
                return False
            first = keras_compat.held_parts.first_value(variable, value)
            self.hold(variable, first, *found)
        return True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, weights and slots that are made wait for their values; see ``settle``."""
        before, self.waits = self.waits, True
        try:
            with self.making():
                yield
        finally:
            self.waits = before

    def settle(self, variables: Iterable[Any], layouts: Layouts) -> None:
        """Cut variables that wait for their values; every rank calls it.

        Args:
            variables: Others among them stay as they are. Weights come before their slots.
            layouts: Of weights. A slot lies as its weight does.
        """
        for variable in variables:
            if waiting := waits(variable):
                self._cut(variable, waiting.owner, layouts)

    def cut(self, variables: Iterable[Any], layouts: Layouts) -> None:
        """Cut weights that are whole; every rank calls it."""
        for variable in variables:
            self._cut(variable, Owner("weight"), layouts)

    def _cut(self, variable: Any, owner: Owner, layouts: Layouts) -> None:
        value = tf.convert_to_tensor(variable.value)
        shape = tuple(value.shape)
        if owner.kind == "slot":
            found = self.layout(variable, shape, owner)
        else:
            layout = layouts.of(variable)
            found = self._in_pieces(variable, owner, layout, self.mesh, shape)
        if found is not None:
            self.hold(variable, value, *found)
        elif waits(variable):
            keras_compat.held_parts.make_whole(variable, value)

    def cut_slots(self, slots: Iterable[Any]) -> bool:
        """Cut slots that optimizers have made before, and keep their values.

        Every rank calls it.

        Returns:
            Whether any was whole.
        """
        is_any = False
        for slot in slots:
            found = None
            if not is_held(slot):
                found = self.layout(slot, tuple(slot.shape), Owner("slot"))
            if found is not None:
                is_any = True
                self.hold(slot, tf.convert_to_tensor(slot.value), *found)
        return is_any

    def hold(
        self, variable: Any, value: tf.Tensor, layout: VariableLayout, ranks: MeshRanks
    ) -> None:
        """Keep this rank's part of a variable; every rank calls it."""
        held = HeldPart(variable, value, layout, ranks, self._read)
        keras_compat.held_parts.hold(variable, held.stand_in)
        self._held.add(held)
        self._has_held = True

    def layout(
        self, variable: Any, shape: tuple[int, ...], owner: Owner | None
    ) -> tuple[VariableLayout, MeshRanks] | None:
        """Return how a variable lies and over which ranks, or None if it is whole.

        Args:
            owner: What it is made for, if that is known.
        """
        is_slot = owner is not None and owner.kind == "slot"
        if is_slot and owner is not None and owner.weight is not None:
            held = part_of(owner.weight)
            if held is not None and held.shape == tuple(shape):
                return self._in_pieces(variable, owner, held.layout, held.ranks.mesh)
        distribution = keras_compat.distribution.current_distribution()
        layout, mesh = VariableLayout(), self.mesh
        layout_map = None
        if self.by_map:
            layout_map = keras_compat.distribution.layout_map_of(distribution)
        if layout_map is not None:
            mesh = Mesh.of(distribution.device_mesh, distribution.batch_dim_name)
        if layout_map is not None and not is_slot:
            path = keras_compat.model.path_of(variable)
            wanted = wanted_for(layout_map, path)
            if not any(wanted is one for one in self._used):
                self._used.append(wanted)
            names = getattr(wanted, "axes", wanted)
            if names and any(names):
                gates = 1 if owner is None else owner.gates
                layout, reasons = lay_out(path, shape, names, mesh, gates)
                if reasons:
                    self._keep_whole(path, shape, variable, reasons)
        return self._in_pieces(variable, owner, layout, mesh, shape)

    def _keep_whole(
        self, path: str, shape: tuple[int, ...], variable: Any, reasons: list[str]
    ) -> None:
        bytes_ = int(np.prod(shape)) * tf.as_dtype(variable.dtype).size
        self.kept_whole[path] = f"{'; '.join(reasons)}; {bytes_:,} bytes"

    def _in_pieces(
        self,
        variable: Any,
        owner: Owner | None,
        layout: VariableLayout,
        mesh: Mesh,
        shape: tuple[int, ...] | None = None,
    ) -> tuple[VariableLayout, MeshRanks] | None:
        """Add what the options ask for to the layout of a variable."""
        kind = "" if owner is None else owner.kind
        is_wanted = (
            self.shard_weights and kind == "weight" and variable.trainable
        ) or ((self.shard_weights or self.shard_optimizer) and kind == "slot")
        is_array = shape is None or len(shape) > 0
        if is_wanted and is_array and mesh.sizes[mesh.batch] > 1:
            layout = VariableLayout(layout.cut, True)
        return None if layout.is_whole else (layout, self.ranks_of(mesh))

    def rows(self, model: keras.Model) -> Backend:
        """Return the backend among the ranks that share the rows of a model's batches."""
        if not self.mesh.model_axes:
            return backend_of_rows(model, self.backend)
        # The model may have no variables yet.
        along: Backend = self.ranks_of(self.mesh).along[self.mesh.batch]
        return along

    def ranks_of(self, mesh: Mesh) -> MeshRanks:
        """Return the ranks on a mesh; every rank calls it, in the same order."""
        key = (*mesh.sizes.items(), mesh.batch)
        if key not in self._ranks:
            self._ranks[key] = MeshRanks(self.backend, mesh)
        return self._ranks[key]

    def _read(self, held: HeldPart) -> None:
        for check in self.before_read:
            check(held)

    @contextlib.contextmanager
    def read_alone(self) -> Iterator[None]:
        """Inside, rank 0 reads whole values while the other ranks ``serve``."""
        if self.backend.rank and len(self._held):
            raise UsageError(
                f"rank {self.backend.rank} saves a model under another path than rank 0, "
                "and its variables are held in parts by all ranks",
                hint="save under one path on every rank: rank 0 writes it",
                everywhere=False,
            )
        if not self._has_held:
            yield
            return
        try:
            with alone.alone(self._announced):
                yield
        finally:
            self._send(alone.NONE)

    @contextlib.contextmanager
    def _announced(self, use: int) -> Iterator[None]:
        self._send(use)
        yield

    def _send(self, use: int) -> int:
        return int(self.backend.broadcast_array(np.array([use]))[0])

    def serve(self) -> None:
        """Take part in what rank 0 reads inside of ``read_alone``."""
        while self._has_held and (use := self._send(alone.NONE)):
            alone.serve(use)
