"""The ranks of a job on a mesh: their groups, and values that they gather and agree on."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.keras_compat.traced import traced
from collective.training.partition.backend_exchange import BackendExchange
from collective.training.partition.layouts import Sharded
from collective.training.partition.mesh import parts
from collective.training.partition.mesh.layouts import Mesh, VariableLayout
from collective.training.partition.mesh.ranks import groups_along, place_of
from collective.training.process.object_collectives import total


class MeshRanks:
    """The place of this rank on a mesh, and its groups; every rank makes it.

    Args:
        backend: One with a replica in each process.

    Attributes:
        place: This rank's number along each axis, by the name of the axis.
        along: By axis: the backend among the ranks that differ along it alone.

    Raises:
        UsageError: The mesh has not as many places as the job has ranks.
    """

    def __init__(self, backend: Backend, mesh: Mesh):
        count = int(np.prod([*mesh.sizes.values()]))
        if count != backend.size:
            raise UsageError(
                f"a mesh of {' x '.join(map(str, mesh.sizes.values()))} has {count} places, "
                f"and the job {backend.size} ranks",
                hint=f"-np {count}; or another shape of the mesh",
            )
        self.backend, self.mesh = backend, mesh
        self.place = place_of(mesh.sizes, backend.rank)
        self.along: dict[str, Backend] = {}
        for axis in (mesh.batch, *mesh.model_axes):
            groups = groups_along(mesh.sizes, axis)
            self.along[axis] = backend if len(groups) == 1 else backend.among(groups)
        self._sum = total(backend)
        self._gathers: dict[Any, Any] = {}

    def is_like(self, other: MeshRanks) -> bool:
        """Return whether these are the same ranks on the same mesh."""
        return (self.backend, self.mesh) == (other.backend, other.mesh)

    @property
    def pieces(self) -> tuple[int, int]:
        """Return this rank's number along the axis of the batch, and the ranks along it."""
        batch = self.mesh.batch
        return self.place[batch], self.mesh.sizes[batch]

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Return rank 0's value if the ranks have others; every rank calls it."""
        array = np.ascontiguousarray(value.numpy())
        mark = zlib.crc32(array.reshape(-1).view(np.uint8).data)
        marks = np.zeros(self.backend.size)
        marks[self.backend.rank] = mark
        if np.all(self._sum(marks) == mark):
            return value
        return tf.constant(self.backend.broadcast_array(array), value.dtype)

    def whole(
        self, part: tf.Tensor, shape: tuple[int, ...], layout: VariableLayout
    ) -> tf.Tensor:
        """Return the variable of which this rank has a part; every rank calls it.

        Args:
            shape: Of the variable.
        """
        axes = [axis for axis in self.mesh.model_axes if axis in layout.cut]
        shapes = [shape]
        for axis in axes:
            shapes.append(parts.shape_of_part(shapes[-1], layout.cut[axis]))
        if layout.in_pieces:
            part = tf.reshape(self._gathered(part, self.mesh.batch), shapes[-1])
        for axis, of_part in zip(reversed(axes), reversed(shapes), strict=False):
            gathered = self._gathered(tf.reshape(part, [-1]), axis)
            rows = tf.reshape(gathered, [self.mesh.sizes[axis], *of_part])
            part = parts.joined(tf.unstack(rows), layout.cut[axis])
        return part

    def part(
        self, value: tf.Tensor, layout: VariableLayout
    ) -> tuple[tf.Tensor, list[tuple[str, Sharded]]]:
        """Return this rank's part of a value along the model axes, and the cuts in order."""
        cuts = [(a, layout.cut[a]) for a in self.mesh.model_axes if a in layout.cut]
        for axis, cut in cuts:
            value = parts.part_of(value, cut, self.place[axis], self.mesh.sizes[axis])
        return value, cuts

    def _gathered(self, flat: tf.Tensor, axis: str) -> tf.Tensor:
        """Return the flat parts of the ranks along an axis, one after the other."""
        key = axis, flat.dtype
        group = self.along[axis]
        if key not in self._gathers:
            exchange = BackendExchange(group)

            def gather(flat: tf.Tensor) -> tf.Tensor:
                return exchange.gather(flat)

            # Ranks that wait for each other compare functions by name. Two axes have other
            # groups, so a rank behind the others would seem to have left out a collective.
            shape = "x".join(map(str, self.mesh.sizes.values()))
            gather.__name__ = re.sub(r"\W", "_", f"gather_along_{axis}_of_{shape}")
            self._gathers[key] = traced(
                gather, input_signature=[tf.TensorSpec([None], flat.dtype)]
            )
        return group.call(self._gathers[key], (flat,))
