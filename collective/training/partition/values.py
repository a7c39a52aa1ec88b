"""What is known of the values of a graph: whole shapes, constants, and sizes.

A step is mostly traced for batches of any length, so TensorFlow knows few shapes. But the
sizes that a program computes with (``tf.shape(x)[0] * 2``) are followed here as
polynomials of the rows, and so the shape of what they make is known after all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.graph import Known, Node, Sizes, Value
from collective.training.partition.layouts import Shape
from collective.training.partition.sizes import (
    AnySize,
    Size,
    agreed,
    is_natural,
    product,
)

#: By type of operation: the inputs of which it makes a product, a quotient or a copy.
_FACTORS: dict[str, Sequence[int]] = {
    **dict.fromkeys(["Mul", "RealDiv"], (0, 1)),
    **dict.fromkeys(["Neg", "Identity", "StopGradient", "Cast"], (0,)),
    **dict.fromkeys(["Reciprocal", "Inv", "Reshape", "ExpandDims", "Squeeze"], (0,)),
    **dict.fromkeys(["BroadcastTo", "Tile"], (0,)),
    "Fill": (1,),
}
_MOST_STEPS = 12  # of such operations, one behind the other
#: Elements of a value that is computed while the graph is read, at most.
_FOLDED = 20_000
# Types whose result is small though an operand may be large.
_ALWAYS_FOLDED = {"BroadcastGradientArgs", "Shape", "ShapeN", "Size", "Rank"}
_NEVER_FOLDED = (tf.variant, tf.resource, tf.string)

FoundShape: TypeAlias = tuple[AnySize | None, ...] | None
"""A shape as a rule finds it: None in place of a size that it does not know."""
Shapes: TypeAlias = FoundShape | Sequence[FoundShape]
"""What a shape rule finds: the shape of the one output, or of each of several."""
ShapeRule = Callable[[Node], Shapes]
# It returns the sizes of the one output, or a list with those of each of several.
SizeRule = Callable[[Node], Sizes]
_SHAPES: dict[str, ShapeRule] = {}
_SIZES: dict[str, SizeRule] = {}


def learn(node: Node) -> None:
    """Find out about a node's outputs from its inputs.

    The function of a loop is looked at again and again: if no more is known of the inputs
    than the last time, no more is found out.
    """
    read = [(v.shape, v.sizes, v.const) for v in node.inputs]
    if node.learned is not None and _is_same(read, node.learned[0]):
        for value, known in zip(node.outputs, node.learned[1], strict=True):
            value.shape, value.sizes, value.const = known
        return
    _learn(node)
    node.learned = read, [(v.shape, v.sizes, v.const) for v in node.outputs]


def _is_same(read: Sequence[Known], before: Sequence[Known]) -> bool:
    return all(
        const is last_const and shape == last_shape and sizes == last_sizes
        for (shape, sizes, const), (last_shape, last_sizes, last_const) in zip(
            read, before, strict=True
        )
    )


def _learn(node: Node) -> None:
    if node.type == "Const":
        if node.outputs[0].dtype != tf.string:
            tensor = node.op.node_def.attr["value"].tensor
            node.outputs[0].const = tf.make_ndarray(tensor)
    elif _is_foldable(node):
        try:
            results = tensorflow_names.run_operation(
                node.op, [v.const for v in node.inputs if v.const is not None]
            )
        except (tf.errors.OpError, ValueError, TypeError):
            results = []  # it fails in the step, too, if it is run there
        for value, result in zip(node.outputs, results, strict=False):
            value.const = result
            value.shape = result.shape
    if node.outputs and node.outputs[0].const is None:
        _learn_shapes(node)
        _learn_sizes(node)


def is_constant(node: Node) -> bool:
    """Return whether all that a node makes is known."""
    return bool(node.outputs) and all(v.const is not None for v in node.outputs)


def axes_in(value: Value, rank: int | None) -> list[int] | None:
    """Return the axes that a constant names, counted from the front, or None if unknown."""
    if value.const is None or rank is None:
        return None
    return [int(a) % rank if rank else 0 for a in np.reshape(value.const, -1)]


def axis_in(value: Value, rank: int | None) -> int | None:
    """Return the one axis that a constant names."""
    axes = axes_in(value, rank)
    return axes[0] if axes else None


def squeezed(node: Node) -> list[int] | None:
    """Return the axes that a Squeeze takes away; None if they are not known."""
    x, axes = node.inputs[0], node.attr("squeeze_dims")
    if x.shape is None or (not axes and not x.is_static):
        return None
    if axes:
        return sorted(axis % len(x.shape) for axis in axes)
    return [axis for axis, size in enumerate(x.shape) if size == 1]


def magnitude(value: Value) -> tuple[float, float]:
    """Return bounds of the absolute values in a value.

    They are those of constants and of sizes, and of what is computed of these: the number
    of rows by which a loss is divided. Of all else nothing is known: (0, inf).
    """
    return _magnitude(value, _MOST_STEPS) or (0.0, math.inf)


def _magnitude(value: Value, steps: int) -> tuple[float, float] | None:
    if value.const is not None and value.const.dtype.kind in "iuf" and value.const.size:
        found = np.abs(value.const.astype(np.float64))
        return (float(found.min()), float(found.max())) if found.max() >= 0 else None
    if isinstance(value.sizes, Size):
        return (1.0 if is_natural(value.sizes - 1) else 0.0), math.inf
    node = value.node
    if node is None or not steps or node.type not in _FACTORS:
        return None
    of_inputs = [_magnitude(node.inputs[i], steps - 1) for i in _FACTORS[node.type]]
    known = [bounds for bounds in of_inputs if bounds is not None]
    if len(known) < len(of_inputs):
        return None
    if node.type in ("Reciprocal", "Inv", "RealDiv"):
        least, most = known[-1]
        known[-1] = 1 / most if most else math.inf, 1 / least if least else math.inf
    least, most = (math.prod(bounds) for bounds in zip(*known, strict=True))
    return None if math.isnan(least) or math.isnan(most) else (least, most)


def broadcast(shapes: Sequence[Shape]) -> list[AnySize | None] | None:
    """Return the broadcast sizes of operands of these shapes, or None if unknown."""
    if any(shape is None for shape in shapes):
        return None
    rank = max((len(s) for s in shapes if s is not None), default=0)
    sizes: list[AnySize | None] = []
    for axis in range(rank):
        of_axis = [
            s[axis - rank] for s in shapes if s is not None and axis >= rank - len(s)
        ]
        sizes.append(agreed(of_axis, broadcasts=True))
    return sizes


# --- constants ---------------------------------------------------------------------


def _is_foldable(node: Node) -> bool:
    if node.is_stateful or node.bodies or not node.inputs:
        return False
    if any(v.const is None for v in node.inputs):
        return False
    if any(v.dtype in _NEVER_FOLDED for v in node.outputs):
        return False
    if node.type in _ALWAYS_FOLDED or not node.outputs:
        return bool(node.outputs)
    read = max(np.asarray(v.const).size for v in node.inputs)
    if any(v.shape is None or not v.is_static for v in node.outputs):
        return bool(read <= _FOLDED)
    made = [product(v.shape or ()) for v in node.outputs]
    return all(isinstance(size, int) and size <= _FOLDED for size in made)


# --- shapes ------------------------------------------------------------------------


def _learn_shapes(node: Node) -> None:
    rule = _SHAPES.get(node.type)
    found: Shapes = None if rule is None else rule(node)
    if found is None:
        found = _inferred(node)
    if found is None:
        return
    shapes = found if isinstance(found, list) else [found]
    for value, shape in zip(node.outputs, shapes, strict=False):
        if shape is None:
            continue
        known = value.static_shape()
        if known is not None and len(known) != len(shape):
            value.shape = known
            continue
        # What TensorFlow knows as a number stays.
        value.shape = tuple(
            old if isinstance(old, int) else value.symbol(axis) if new is None else new
            for axis, (old, new) in enumerate(
                zip(known or [None] * len(shape), shape, strict=True)
            )
        )


def of_rows(*types: str, behind: int = 0) -> None:
    """Declare operations whose outputs have as many rows as their first input.

    Args:
        behind: How many axes the operation itself uses: the rows are in front of them.
    """
    _OF_ROWS.update(dict.fromkeys(types, behind))


def _inferred(node: Node) -> list[Shape] | None:
    """Return what TensorFlow finds out, where more is known here than when it was traced.

    As in the body of a loop, of whose variables TensorFlow knows no shape.
    """
    if node.is_stateful or node.bodies or all(v.is_static for v in node.outputs):
        return None
    shapes = [v.shape for v in node.inputs]
    known = [
        [None if isinstance(s, Size) else s for s in shape]
        for shape in shapes
        if shape is not None
    ]
    given = iter(known)
    found = tensorflow_names.inferred_shapes(
        node.op,
        [None if shape is None else next(given) for shape in shapes],
        [v.const for v in node.inputs],
    )
    if found is None:
        return None
    results: list[Shape] = []
    for value, shape in zip(node.outputs, found, strict=True):
        if shape is None:
            results.append(None)
            continue
        sizes = [value.symbol(i) if s is None else s for i, s in enumerate(shape)]
        least, first = _OF_ROWS.get(node.type), shapes[0]
        is_open = bool(sizes) and shape[0] is None
        if is_open and first and least is not None and len(first) > least:
            sizes[0] = first[0]
        results.append(tuple(sizes))
    return results


_OF_ROWS: dict[str, int] = {}


def shape_rule(*types: str) -> Callable[[ShapeRule], ShapeRule]:
    """Declare what finds the whole shapes of what some types of operations make."""

    def add(rule: ShapeRule) -> ShapeRule:
        for name in types:
            _SHAPES[name] = rule
        return rule

    return add


def elementwise(*types: str) -> None:
    """Declare operations whose output has the shape that its inputs broadcast to."""
    for name in types:
        _SHAPES[name] = _broadcast_shape


def alike(*types: str) -> None:
    """Declare operations whose outputs have the shape of the first input."""
    for name in types:
        _SHAPES[name] = lambda node: [node.inputs[0].shape] * len(node.outputs)


def _broadcast_shape(node: Node) -> FoundShape:
    sizes = broadcast([v.shape for v in node.inputs])
    return None if sizes is None else tuple(sizes)


# --- sizes -------------------------------------------------------------------------


def _learn_sizes(node: Node) -> None:
    rule = _SIZES.get(node.type)
    if rule is None or not node.outputs or not node.outputs[0].dtype.is_integer:
        return
    try:
        found = rule(node)
    except (IndexError, ValueError):
        found = None  # it fails in the step, too, if it is run there
    if found is None:
        return
    many = found if isinstance(found, list) else [found]
    for value, sizes in zip(node.outputs, many, strict=False):
        value.sizes = sizes
        if sizes is None:
            continue
        table = np.array(sizes, object)
        value.shape = table.shape
        if all(isinstance(size, int) for size in table.flat):
            value.const = table.astype(value.dtype.as_numpy_dtype)


def size_rule(*types: str) -> Callable[[SizeRule], SizeRule]:
    """Declare what finds the sizes that some types of operations compute."""

    def add(rule: SizeRule) -> SizeRule:
        for name in types:
            _SIZES[name] = rule
        return rule

    return add
