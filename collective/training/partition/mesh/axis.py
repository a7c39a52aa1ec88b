"""The pass over one model axis: a traced function, as one rank of the axis computes it.

What comes out is a graph like the one that went in, with this rank's parts of variables and
with markers for exchanges (``markers``). So the next axis is another pass over it, and the
last one is over the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.emission import Traffic
from collective.training.partition.layouts import WHOLE
from collective.training.partition.mesh.marked import MarkedExchange
from collective.training.partition.partition import Partition, Placed
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share


class AxisPass:
    """A function whose variables are cut along a model axis, for one of its ranks.

    Args:
        function: What has the ``graph`` of a traced function: a concrete function, or the
            pass over another axis. Its arguments are equal on all ranks of the axis.
        axis: The name of the axis.
        place, size: This rank's number along the axis, and its ranks.
        placed: How the variables lie that are cut, by the ``id`` of the handle that the
            function was traced with.
        gradients: By the name of a tensor: the variable whose gradient it is.
        has_rows: For each argument, whether its first axis has the rows of the batch.

    Attributes:
        graph: A ``FuncGraph`` with the same arguments and results.
        gradients: As the argument, for this graph.
        partition, traffic: What lies how, and what is exchanged along the axis.
    """

    def __init__(
        self,
        function: Any,
        axis: str,
        place: int,
        size: int,
        placed: Mapping[int, Placed],
        gradients: Mapping[str, Any] | None = None,
        has_rows: Sequence[bool] = (),
    ):
        count = len(function.graph.inputs) - len(function.graph.captures)
        self.partition = Partition(
            function,
            [WHOLE] * count,
            Rows.places(size),
            gradients,
            placed,
            [place for place, has in enumerate(has_rows) if has],
        )
        self.traffic = Traffic()
        self.graph = tensorflow_names.function_graph_of(axis)
        with self.graph.as_default():
            arguments = [
                tf.compat.v1.placeholder(t.dtype, t.shape)
                for t in function.graph.inputs[:count]
            ]
            emission = self.partition.begun(
                [[argument] for argument in arguments],
                Share.of_places(size, [place]),
                MarkedExchange(axis, place, size),
                self.traffic,
            )
            results = emission.run([WHOLE] * len(function.graph.outputs))
            outputs = [tf.identity(result) for (result,) in results]
            effects = emission.effects()
        tensorflow_names.complete(self.graph, arguments, outputs, effects)
        found = (
            (emission.made_of(value), value.variable)
            for value in self.partition.graph.values()
            if value.variable is not None
        )
        self.gradients = {
            made.name: variable for made, variable in found if made is not None
        }
