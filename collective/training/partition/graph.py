"""The graph of a traced function, as nodes: calls inlined, loops and branches nested.

``read`` makes it of a ``FuncGraph``. The rest of this folder fills in what is known of
each value (``values``) and how it lies over the replicas (``propagation``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.layouts import (
    WHOLE,
    Layout,
    Shape,
    Sharded,
)
from collective.training.partition.markers import MARKED, Marker, marker_of
from collective.training.partition.sizes import AnySize, Symbol, symbolic

if TYPE_CHECKING:
    from collective.training.partition.plans import Plan

_HANDLES = {tf.resource, tf.variant}
Sizes: TypeAlias = Any
"""What an integer value holds: a size, a tuple of sizes, or a tuple of tuples of them, by its
rank; None if it is unknown. Whoever reads it knows the rank, which no type says."""
Known = tuple[Shape, Sizes, np.ndarray | None]
"""The shape of a value, the sizes that it holds, and its constant value."""
#: Elements of a value that is taken for sizes, at most.
MOST_SIZES = 64
# The attributes that hold functions, by type of operation.
_NESTED = {
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}


class Value:
    """A tensor of the graph.

    Attributes:
        node, index: What makes it; node is None for an input of the graph.
        source: TensorFlow's tensor.
        is_handle: Whether it stands for a variable, a list or the like, and has no numbers.
        shape: Its whole shape.
        const: Its value, if it is known.
        sizes: Where it holds sizes: of a scalar an int or ``Size``, of a vector a tuple, of
            a matrix a tuple of tuples.
        users: The nodes that read it.
        variable: The variable whose gradient it is, or None if unknown.
        has_rows: Whether it was computed of anything that has rows.
        layout: How it lies over the replicas.
        offer: Of a whole value that was computed of rows: how it can be shared out again,
            which costs nothing; see ``offers``.
        is_needed_whole: Whether a node needs a partial value in another layout.
        is_read_owned: Whether all that read it take the piece of their rank.
        exchanges: How many exchanges must come before it, one after the other.
        is_nested: Whether it is in a loop or branch, so that it is another tensor in each
            round, and there is none outside.
    """

    __slots__ = (
        "_symbols",
        "const",
        "dtype",
        "exchanges",
        "has_rows",
        "index",
        "is_handle",
        "is_needed_whole",
        "is_nested",
        "is_read_owned",
        "layout",
        "node",
        "offer",
        "shape",
        "sizes",
        "source",
        "users",
        "variable",
    )

    def __init__(self, node: Node | None, index: int, source: tf.Tensor):
        self.node, self.index, self.source = node, index, source
        self.dtype: tf.DType = source.dtype
        self.is_handle = self.dtype in _HANDLES
        self.users: list[Node] = []
        self.is_nested = self.has_rows = False
        self.variable: Any = None
        self._symbols: dict[int, Symbol] = {}
        self.shape: Shape = None
        self.forget()

    def forget(self) -> None:
        """Return to what is known before the graph was looked at."""
        self.const: np.ndarray | None = None
        self.sizes: Sizes = None
        self.layout: Layout = WHOLE
        self.offer: Sharded | None = None
        self.is_needed_whole = self.is_read_owned = False
        self.exchanges = 0
        self.shape = self.static_shape()

    def static_shape(self) -> Shape:
        """Return what TensorFlow knows, with symbols for the rest."""
        shape = self.source.shape
        if shape.rank is None:
            return None
        return tuple(
            self.symbol(axis) if size is None else size
            for axis, size in enumerate(shape.as_list())
        )

    def symbol(self, axis: int) -> AnySize:
        """Return the unknown size of an axis: always the same symbol."""
        if axis not in self._symbols:
            name = f"{self.source.name}[{axis}]"
            self._symbols[axis] = Symbol(name, (self, axis))
        return symbolic(self._symbols[axis])

    @property
    def rank(self) -> int | None:
        """Return the number of its axes, or None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def is_static(self) -> bool:
        """Return whether every size is a number."""
        return self.shape is not None and all(isinstance(s, int) for s in self.shape)

    def __repr__(self) -> str:
        return f"{self.source.name} {self.shape} {self.layout}"


def variables_of(values: Sequence[Value]) -> dict[int, Any]:
    """Return the variable of each value that is a gradient, by the value's index."""
    pairs = ((i, value.variable) for i, value in enumerate(values))
    return {i: variable for i, variable in pairs if variable is not None}


def sizes_in(value: Value) -> Sizes:
    """Return the sizes that an integer value holds (see ``Value.sizes``), or None."""
    if value.sizes is None and value.const is not None and value.dtype.is_integer:
        const = np.asarray(value.const)
        if const.ndim == 0:
            return int(const)
        if const.ndim == 1 and const.size <= MOST_SIZES:
            return tuple(int(c) for c in const)
        if const.ndim == 2 and const.size <= MOST_SIZES:
            return tuple(tuple(int(c) for c in row) for row in const)
    return value.sizes


class Node:
    """An operation of the graph."""

    __slots__ = (
        "bodies",
        "control",
        "in_pieces",
        "inputs",
        "is_compiled",
        "learned",
        "marker",
        "mean",
        "number",
        "op",
        "outputs",
        "plan",
    )

    def __init__(
        self, number: int, op: tf.Operation, inputs: list[Value], control: list[Node]
    ):
        self.number, self.op = number, op
        self.inputs, self.control = inputs, control
        self.outputs = [Value(self, i, t) for i, t in enumerate(op.outputs)]
        self.bodies: list[Graph] = []  # of a loop or branch, its functions
        self.mean: Value | None = None  # of a variance; see rules/moments.py
        # What was known of the inputs, and of the outputs then; see ``values.learn``.
        self.learned: tuple[list[Known], list[Known]] | None = None
        # What it stands for, if not for itself: see ``mesh.markers``.
        self.marker: Marker | None = marker_of(op)
        self.plan: Plan  # see ``propagation``
        self.in_pieces = False  # whether it reduces pieces, one on each rank
        # Whether XLA compiles the function that it is from; see ``compiled``.
        self.is_compiled = False
        for value in inputs:
            value.users.append(self)

    @property
    def type(self) -> str:
        """Return the type of the operation, or of what it stands for."""
        if self.marker is not None:
            return MARKED.get(self.marker.kind, "MarkedReduction")
        return str(self.op.type) if self.mean is None else "Variance"

    @property
    def is_stateful(self) -> bool:
        """Return whether it does more than compute outputs, or computes others each time."""
        return self.marker is not None or bool(self.op.op_def.is_stateful)

    def attr(self, name: str) -> Any:
        """Return an attribute of the operation."""
        return self.op.get_attr(name)

    def __repr__(self) -> str:
        return f"{self.type} {self.op.name}"


class Graph:
    """Nodes in an order in which they can run.

    Attributes:
        inputs: The values that it is called with, in order; those that no node reads
            are there, too.
        outputs: The values that it returns, in order.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []

    def values(self) -> Iterator[Value]:
        """Return all values, those of nested graphs included."""
        yield from self.inputs
        for node in self.nodes:
            yield from node.outputs
            for body in node.bodies:
                yield from body.values()


def read(
    func_graph: tf.Graph,
    gradients: Mapping[str, Any] | None = None,
    is_compiled: bool = False,
) -> Graph:
    """Return the nodes that outputs and effects of a ``FuncGraph`` need.

    Args:
        gradients: By the name of a tensor: the variable whose gradient it is.
        is_compiled: Whether XLA compiles the function.
    """
    graph = Graph()
    graph.inputs = [Value(None, i, t) for i, t in enumerate(func_graph.inputs)]
    reader = _Reader(graph, func_graph, is_compiled)
    graph.outputs = reader.read(graph.inputs)
    for name, variable in (gradients or {}).items():
        if name in reader.values:  # else nothing needs it
            reader.values[name].variable = variable
            _before_cast(reader.values[name]).variable = variable
    return graph


def _before_cast(value: Value) -> Value:
    """Return the float16 that a value is a cast of, which is summed in its place.

    Returns:
        The value itself if it is none, or if something else reads that.
    """
    before = value
    while (node := before.node) is not None and node.type in ("Cast", "Identity"):
        (before,) = node.inputs
        if before.users != [node]:
            break
        if before.dtype == tf.float16:
            return before
    return value


class _Reader:
    """Adds the operations of a ``FuncGraph`` to a graph.

    Args:
        is_compiled: Whether XLA compiles the function.
    """

    def __init__(self, graph: Graph, func_graph: tf.Graph, is_compiled: bool = False):
        self.graph = graph
        self.func_graph = func_graph
        self.is_compiled = is_compiled
        self.values: dict[str, Value] = {}  # by the name of TensorFlow's tensor
        self.nodes: dict[str, list[Node]] = {}  # what runs for an operation

    def read(self, inputs: Sequence[Value]) -> list[Value]:
        """Return the values that the function returns when it is called with ``inputs``."""
        for tensor, value in zip(self.func_graph.inputs, inputs, strict=True):
            self.values[tensor.name] = value
            self.nodes[tensor.op.name] = []
        for op in _in_order(self.func_graph):
            if op.name not in self.nodes:
                self._add(op)
        return [self.values[t.name] for t in self.func_graph.outputs]

    def _add(self, op: tf.Operation) -> None:
        inputs = [self.values[t.name] for t in op.inputs]
        control = [n for c in op.control_inputs for n in self.nodes[c.name]]
        called = tensorflow_names.called_function(op)
        if called is not None:
            self._inline(op, called, inputs, control)
            return
        node = Node(len(self.graph.nodes), op, inputs, control)
        node.is_compiled = self.is_compiled
        for name in _NESTED.get(op.type, ()):
            functions = op.get_attr(name)
            for function in functions if isinstance(functions, list) else [functions]:
                body = tensorflow_names.function_graph(op, function.name)
                node.bodies.append(read(body, is_compiled=self.is_compiled))
                for value in node.bodies[-1].values():
                    value.is_nested = True
        self.graph.nodes.append(node)
        self.nodes[op.name] = [node]
        for tensor, value in zip(op.outputs, node.outputs, strict=True):
            self.values[tensor.name] = value

    def _inline(
        self,
        op: tf.Operation,
        called: tf.Graph,
        inputs: list[Value],
        control: list[Node],
    ) -> None:
        first = len(self.graph.nodes)
        is_compiled = self.is_compiled or tensorflow_names.is_compiled(op)
        outputs = _Reader(self.graph, called, is_compiled).read(inputs)
        effects = [n for n in self.graph.nodes[first:] if n.is_stateful]
        for node in effects:
            node.control = [*node.control, *control]
        self.nodes[op.name] = effects or control
        for tensor, value in zip(op.outputs, outputs, strict=True):
            self.values[tensor.name] = value


def _in_order(func_graph: tf.Graph) -> Iterator[tf.Operation]:
    """Return the operations that outputs and effects need, each behind what it needs."""
    done: set[str] = set()
    roots = [t.op for t in func_graph.outputs] + list(func_graph.control_outputs)
    wanted = _needed(roots)
    for root in func_graph.get_operations():  # nearly in order already
        if root.name not in wanted:
            continue
        stack = [root]
        while stack:
            op = stack[-1]
            if op.name in done:
                stack.pop()
                continue
            waiting = [b for b in _before(op) if b.name not in done]
            stack += waiting
            if not waiting:
                done.add(op.name)
                yield stack.pop()


def _needed(roots: list[tf.Operation]) -> set[str]:
    found: set[str] = set()
    stack = list(roots)
    while stack:
        op = stack.pop()
        if op.name not in found:
            found.add(op.name)
            stack += _before(op)
    return found


def _before(op: tf.Operation) -> list[tf.Operation]:
    return [t.op for t in op.inputs] + list(op.control_inputs)
