"""How each variable of a model lies over a mesh, by a layout map of ``keras.distribution``.

A layout names for each axis of a variable the axis of the mesh along which it is cut, or
None. The name of the batch's axis means pieces over the ranks that share the batch (ZeRO-3):
they are of the flat variable, whichever of its axes has the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.partition.layouts import Sharded


@dataclass(frozen=True)
class Mesh:
    """The axes of a job.

    Attributes:
        sizes: Ranks along each axis, by its name, in the order of the mesh.
        batch: The name of the axis over which batches are shared out.
    """

    sizes: Mapping[str, int]
    batch: str

    @classmethod
    def of(cls, devices: Any, batch: str | None = None) -> Mesh:
        """Return the axes of a ``keras.distribution.DeviceMesh``.

        Args:
            batch: ``batch_dim_name`` of the distribution; by default the first axis.
        """
        names = list(devices.axis_names)
        return cls(dict(zip(names, devices.shape, strict=True)), batch or names[0])

    @property
    def model_axes(self) -> list[str]:
        """Return the axes over which weights are cut, and batches are not, of several ranks."""
        return [n for n, size in self.sizes.items() if n != self.batch and size > 1]


@dataclass(frozen=True)
class VariableLayout:
    """How a variable lies over a mesh.

    Attributes:
        cut: By axis of the mesh: how the variable is cut along it.
        in_pieces: Whether what is left of it is in pieces over the batch's axis.
    """

    cut: Mapping[str, Sharded] = field(default_factory=dict)
    in_pieces: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether each rank has all of it."""
        return not self.cut and not self.in_pieces

    def names(self, rank: int) -> tuple[str | None, ...]:
        """Return for each axis of the variable the axis of the mesh that cuts it, or None."""
        by_place = {cut.axis: name for name, cut in self.cut.items()}
        return tuple(map(by_place.get, range(rank)))


@dataclass
class Layouts:
    """The layouts of a model's variables.

    Attributes:
        by_path: The layout of each variable that is not whole.
        kept_whole: Variables that the map would cut, with the reason why they are not.
        unmatched: Patterns of the map that no variable has.
    """

    by_path: dict[str, VariableLayout] = field(default_factory=dict)
    kept_whole: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def of(self, variable: Any) -> VariableLayout:
        """Return the layout of a variable of the model."""
        return self.by_path.get(keras_compat.model.path_of(variable), VariableLayout())


def resolve(model: keras.Model, layout_map: Mapping[str, Any], mesh: Mesh) -> Layouts:
    """Find how each variable of a built model lies.

    Args:
        layout_map: A ``keras.distribution.LayoutMap``, or what gives a tuple of names, a
            ``TensorLayout`` or None for the path of a variable.

    Raises:
        UsageError: A layout has another number of axes than its variable, or names an
            axis twice, or one that the mesh does not have.
    """
    found = Layouts()
    blocks, used = blocks_of(model), set()
    for variable in model.variables:
        path = keras_compat.model.path_of(variable)
        wanted = wanted_for(layout_map, path)
        used.add(id(wanted))
        names = getattr(wanted, "axes", wanted)
        if not names or not any(names):
            continue
        layout, reasons = lay_out(
            path, variable.shape, names, mesh, blocks.get(path, 1)
        )
        if reasons:
            found.kept_whole[path] = "; ".join(reasons)
        if not layout.is_whole:
            found.by_path[path] = layout
    found.unmatched = [key for key in layout_map if id(layout_map[key]) not in used]
    return found


def wanted_for(layout_map: Mapping[str, Any], path: str) -> Any:
    """Return what a map gives a path, or None.

    Raises:
        UsageError: Several patterns of the map match the path.
    """
    try:
        return layout_map[path]
    except KeyError:
        return None
    except ValueError as error:  # several patterns match
        raise UsageError(str(error), hint="narrow one of the patterns") from None


def _check(path: str, shape: Sequence[int], names: Sequence[Any], mesh: Mesh) -> None:
    said = f"the layout {tuple(names)} of {path}, whose shape is {tuple(shape)},"
    hint = f"axes of the mesh: {', '.join(mesh.sizes)}; None for an axis that is whole"
    if len(names) != len(shape):
        raise UsageError(f"{said} has {len(names)} axes", hint=hint)
    given = [name for name in names if name is not None]
    for name in given:
        if name not in mesh.sizes:
            raise UsageError(f"{said} names {name!r}, which the mesh lacks", hint=hint)
        if given.count(name) > 1:
            raise UsageError(f"{said} names {name!r} twice", hint=hint)


def lay_out(
    path: str, shape: Sequence[int], names: Sequence[Any], mesh: Mesh, blocks: int
) -> tuple[VariableLayout, list[str]]:
    """Return the layout of a variable, and why axes of it stay whole.

    Args:
        names: For each axis of the variable, an axis of the mesh or None.
        blocks: Gates that lie side by side in its last axis; see ``gates_of``.

    Raises:
        UsageError: As ``resolve``.
    """
    _check(path, shape, names, mesh)
    cut: dict[str, Sharded] = {}
    reasons = []
    for axis, name in enumerate(names):
        if name is None or name == mesh.batch or mesh.sizes[name] == 1:
            continue
        of_axis = blocks if axis == len(shape) - 1 else 1
        size, rest = divmod(shape[axis], mesh.sizes[name] * of_axis)
        if rest:
            parts = f"{of_axis} times " if of_axis > 1 else ""
            reasons.append(
                f"axis {axis} of {shape[axis]} is not divided by {parts}"
                f"{mesh.sizes[name]} ({name!r})"
            )
            continue
        cut[name] = Sharded(axis, (size,) * of_axis)
    in_pieces = mesh.batch in names and mesh.sizes[mesh.batch] > 1
    return VariableLayout(cut, in_pieces), reasons


def blocks_of(model: keras.Model) -> dict[str, int]:
    """Return the paths of weights that have several gates, and how many."""
    return {
        keras_compat.model.path_of(variable): count
        for layer in keras_compat.model.layers_of(model)
        if (count := gates_of(layer)) > 1
        for variable in layer.variables
    }


def gates_of(layer: Any) -> int:
    """Return how many gates lie side by side in the last axis of a layer's weights.

    Each rank has units, of every gate its own.
    """
    kinds = {
        keras.layers.LSTM: 4,
        keras.layers.LSTMCell: 4,
        keras.layers.GRU: 3,
        keras.layers.GRUCell: 3,
        keras.layers.ConvLSTM1D: 4,
        keras.layers.ConvLSTM2D: 4,
        keras.layers.ConvLSTM3D: 4,
        keras_compat.layers.ConvLSTMCell: 4,
    }
    found = (count for kind, count in kinds.items() if isinstance(layer, kind))
    return next(found, 1)
