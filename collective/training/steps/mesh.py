"""The passes over the model axes of a mesh, for a step whose variables are held in parts.

Behind them is a graph for one rank of each model axis. ``program`` partitions it by rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training.partition import explain
from collective.training.partition.backend_exchange import BackendExchange
from collective.training.partition.exchange import Exchange
from collective.training.partition.mesh.axis import AxisPass
from collective.training.partition.partition import Placed
from collective.training.sharding.held import HeldPart, held_in


@dataclass(frozen=True)
class OverAxes:
    """A traced step after the passes over the model axes; as it was if it has none.

    Attributes:
        function: What has the ``graph``.
        gradients: By the name of a tensor of it: the variable whose gradient it is.
        rows: The backend among the ranks that share the rows of a batch.
        placed: The variables of which each of these has a piece.
        axes: By the name of a model axis: the exchange along it.
        passes: By the name of a model axis.
        held: The variables of which this rank has a part.
    """

    function: Any
    gradients: Mapping[str, Any]
    rows: Backend
    placed: Mapping[int, Placed] = field(default_factory=dict)
    axes: Mapping[str, Exchange] = field(default_factory=dict)
    passes: Mapping[str, AxisPass] = field(default_factory=dict)
    held: Sequence[HeldPart] = ()

    def explain(self, name: str) -> None:
        """Log what is exchanged along each model axis, once the step has run."""
        for axis, of_axis in self.passes.items():
            explain.report(of_axis.partition, of_axis.traffic, f"{name} along {axis!r}")


def over_model_axes(
    function: Any,
    gradients: Mapping[str, Any],
    has_rows: Sequence[bool],
    backend: Backend,
) -> OverAxes:
    """Return a traced step for this rank's place along each model axis.

    Args:
        function: A concrete function.
        gradients: By the name of a tensor of it: the variable whose gradient it is.
        has_rows: For each argument, whether its first axis has the rows of the batch.
        backend: Of all ranks.

    Raises:
        UsageError: The variables are held on several meshes.
    """
    held = held_in(function.graph)
    if not held:
        return OverAxes(function, gradients, backend)
    ranks = held[0].ranks
    other = next((h for h in held if not h.ranks.is_like(ranks)), None)
    if other is not None:
        raise UsageError(
            f"a step uses {held[0].path!r} and {other.path!r}, which are laid out over "
            "different meshes",
            hint="one distribution for all variables of a model and its optimizer: call "
            "keras.distribution.set_distribution before they are made",
        )
    batch, passes = ranks.mesh.batch, {}
    for axis in ranks.mesh.model_axes:
        passed = AxisPass(
            function,
            axis,
            ranks.place[axis],
            ranks.mesh.sizes[axis],
            _placed(held, axis),
            gradients,
            has_rows,
        )
        function, gradients = passed, passed.gradients
        passes[axis] = passed
    axes = {axis: BackendExchange(ranks.along[axis]) for axis in passes}
    rows = ranks.along[batch]
    return OverAxes(function, gradients, rows, _placed(held, batch), axes, passes, held)


def in_pieces(graph: Any) -> dict[int, Placed]:
    """Return the variables of a traced graph of which the ranks of a job have pieces.

    Raises:
        UsageError: The ranks are along several axes.
    """
    held = held_in(graph)
    cut = next((one for one in held if one.layout.cut), None)
    if cut is not None:
        raise UsageError(
            f"{cut.path!r} is cut along a model axis, and so it is trained by model.fit alone",
            hint="call model.fit, in a script that collectiverun starts",
        )
    return _placed(held, held[0].ranks.mesh.batch) if held else {}


def _placed(held: Sequence[HeldPart], axis: str) -> dict[int, Placed]:
    """Return the variables that are cut along an axis, for the pass over it."""
    return {
        id(before.handle): Placed(layout, [behind.handle])
        for one in held
        for of, layout, before, behind in one.steps
        if of == axis
    }
