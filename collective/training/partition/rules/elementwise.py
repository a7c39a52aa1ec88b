"""Operations on each element: the layout stays; sums pass through what is linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node, Value
from collective.training.partition.layouts import (
    SUM,
    WHOLE,
    Layout,
    Listed,
    Partial,
    Sharded,
)
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.sizes import AnySize, agreed, product
from collective.training.partition.values import (
    Shapes,
    alike,
    broadcast,
    elementwise,
    magnitude,
    shape_rule,
)

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_ONE = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BesselI0",
    "BesselI0e",
    "BesselI1",
    "BesselI1e",
    "BesselJ0",
    "BesselJ1",
    "BesselK0",
    "BesselK0e",
    "BesselK1",
    "BesselK1e",
    "BesselY0",
    "BesselY1",
    "Ceil",
    "Cos",
    "Cosh",
    "Dawsn",
    "Digamma",
    "Elu",
    "Erf",
    "Erfc",
    "Erfinv",
    "Exp",
    "Expint",
    "Expm1",
    "Floor",
    "FresnelCos",
    "FresnelSin",
    "Identity",
    "Inv",
    "Invert",
    "IsFinite",
    "IsInf",
    "IsNan",
    "LeakyRelu",
    "Lgamma",
    "Log",
    "Log1p",
    "LogicalNot",
    "Ndtri",
    "Neg",
    "OnesLike",
    "ZerosLike",
    "Reciprocal",
    "Relu",
    "Relu6",
    "Rint",
    "Round",
    "Rsqrt",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Spence",
    "Sqrt",
    "Square",
    "Tan",
    "Tanh",
    "StopGradient",
    "PreventGradient",
    "CheckNumerics",
    "CheckNumericsV2",
    "DeepCopy",
    "GuaranteeConst",
    "Snapshot",
    "Cast",
    "Real",
    "Imag",
    "Conj",
    "ComplexAbs",
    "Angle",
    "FakeQuantWithMinMaxArgs",
    "PopulationCount",
]

_MORE = [
    "EluGrad",
    "LeakyReluGrad",
    "InvGrad",
    "ReciprocalGrad",
    "Relu6Grad",
    "ReluGrad",
    "RsqrtGrad",
    "SeluGrad",
    "SigmoidGrad",
    "SoftplusGrad",
    "SoftsignGrad",
    "SqrtGrad",
    "TanhGrad",
    "FakeQuantWithMinMaxArgsGradient",
    "Add",
    "AddV2",
    "Sub",
    "Mul",
    "Div",
    "DivNoNan",
    "RealDiv",
    "FloorDiv",
    "FloorMod",
    "Mod",
    "TruncateDiv",
    "TruncateMod",
    "Pow",
    "Maximum",
    "Minimum",
    "SquaredDifference",
    "Xdivy",
    "Xlogy",
    "Xlog1py",
    "MulNoNan",
    "Atan2",
    "Igamma",
    "Igammac",
    "IgammaGradA",
    "Zeta",
    "Polygamma",
    "Betainc",
    "Less",
    "LessEqual",
    "Greater",
    "GreaterEqual",
    "Equal",
    "NotEqual",
    "ApproximateEqual",
    "LogicalAnd",
    "LogicalOr",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "LeftShift",
    "RightShift",
    "NextAfter",
    "SelectV2",
    "AddN",
    "ClipByValue",
    "Complex",
]

elementwise(*_MORE)
alike(*_ONE)
EACH_ELEMENT = (*_ONE, *_MORE)


@shape_rule("AddN")
def _of_one_shape(node: Node) -> Shapes:
    """Return what is known of any operand, which is true of all."""
    shapes = [v.shape for v in node.inputs if v.shape is not None]
    if not shapes or any(len(shape) != len(shapes[0]) for shape in shapes):
        return None
    return tuple(min(sizes, key=_unknown) for sizes in zip(*shapes, strict=True))


def _unknown(size: AnySize) -> int:
    """Return how little is known of a size: an argument's is better than an operation's."""
    if isinstance(size, int):
        return 0
    return 1 if all(symbol.is_positive for symbol in size.symbols) else 2


@rule(*EACH_ELEMENT)
def each_element(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Lay the result out as the largest sharded operand."""
    if layouts and all(isinstance(lay, Listed) for lay in layouts):
        return _lists(layouts)
    if any(isinstance(lay, Partial) for lay in layouts):
        plan = _shape_alone(node, layouts) or handed_on(node, layouts)
        if plan is not None:
            return plan
        layouts = summed(layouts)
    chosen = _largest(node, layouts)
    if chosen is None:
        return whole(node)
    place, layout = chosen
    sizes = broadcast([v.shape for v in node.inputs])
    if sizes is None:
        return None
    made = layout.moved(layout.axis + len(sizes) - (node.inputs[place].rank or 0))
    size = made.per_row * rows.rows
    wanted: list[Layout] = []
    for value in node.inputs:
        want = operand(value, made, len(sizes), size)
        if want is None:
            return None
        wanted.append(want)
    return Plan(wanted, [made])


def operand(value: Value, made: Sharded, rank: int, size: AnySize) -> Layout | None:
    """Return how an operand is taken whose result of ``rank`` axes is ``made``.

    Args:
        size: The size of the sharded axis, as it is whole.

    Returns:
        None if the axis may have any size: whether it is broadcast is not known.
    """
    if value.shape is None:
        return None
    axis = made.axis - rank + len(value.shape)
    if axis < 0:
        return WHOLE
    if isinstance(value.layout, Sharded) and value.layout == made.moved(axis):
        return value.layout
    if value.shape[axis] == size:
        return made.moved(axis)
    return WHOLE if value.shape[axis] == 1 else None


def _largest(node: Node, layouts: Sequence[Layout]) -> tuple[int, Sharded] | None:
    """Return the sharded operand with most axes, by its place; the first of several."""
    found: tuple[int, Sharded] | None = None
    for place, layout in enumerate(layouts):
        if isinstance(layout, Sharded) and (
            found is None
            or (node.inputs[place].rank or 0) > (node.inputs[found[0]].rank or 0)
        ):
            found = place, layout
    return found


def _lists(layouts: Sequence[Layout]) -> Plan:
    """Return sums and zeros of lists: all lie as the one whose elements are shared out."""
    found: Layout = layouts[0]
    for layout in layouts:
        if isinstance(layout, Listed) and layout.element is not None:
            whole_so_far = isinstance(found, Listed) and found.element in (None, WHOLE)
            found = layout if whole_so_far else found
    return Plan([found] * len(layouts), [found])


def _shape_alone(node: Node, layouts: list[Layout]) -> Plan | None:
    if node.type not in ("ZerosLike", "OnesLike"):
        return None
    return Plan(layouts, [WHOLE])


def handed_on(node: Node, layouts: Sequence[Layout]) -> Plan | None:
    """Carry a partial sum through an operation that is linear in it; None if it is not.

    What replicas have of a sum may be far from it: a factor that is large, infinite or
    no number would make of 1e20 and -1e20 what their sum 0 is not. So only those factors
    are applied before the sum that are known to make no number larger.
    """
    kind, out = node.type, node.outputs[0]
    if any(lay not in (WHOLE, SUM) for lay in layouts) or not out.dtype.is_floating:
        return None
    sums = [v for v, lay in zip(node.inputs, layouts, strict=True) if lay == SUM]
    if out.shape is None or any(v.shape is None for v in sums):
        return None
    if not any(v.shape == out.shape for v in sums) and product(out.shape) != 1:
        return None  # not to something larger, which would be sent in its place
    if kind in ("Neg", "Identity", "StopGradient", "PreventGradient", "Snapshot"):
        return Plan(layouts, [SUM])
    if kind == "Cast":
        before = node.inputs[0].dtype
        wider = before.is_floating and out.dtype.size >= before.size
        return Plan(layouts, [SUM]) if wider else None
    if kind == "Mul" and len(sums) == 1:
        factor = node.inputs[layouts.index(WHOLE)]
        return Plan(layouts, [SUM]) if magnitude(factor)[1] <= 1 else None
    if kind in ("RealDiv", "DivNoNan") and layouts[1] == WHOLE:
        return Plan(layouts, [SUM]) if magnitude(node.inputs[1])[0] >= 1 else None
    if kind in ("Add", "AddV2", "Sub", "AddN"):  # one replica adds what is whole
        others = [v for v, lay in zip(node.inputs, layouts, strict=True) if lay != SUM]
        # What is whole only after a later exchange would have the sum wait for another.
        last = max((v.exchanges for v in others), default=0)
        is_late = last > max(v.exchanges for v in sums)
        return None if is_late else Plan([SUM] * len(layouts), [SUM])
    return None


@rule("IdentityN")
def identities(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Lay each output out as its input."""
    return Plan(layouts, list(layouts))


alike("EnsureShape")


@rule("EnsureShape")
def ensure_shape(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Check the shape only where it is known, because it is not that of a share."""
    (layout,) = summed(layouts)
    if not isinstance(layout, Sharded):
        return whole(node)

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.identity(x[0])]

    return Plan([layout], [layout], emit)


@rule("Bitcast")
def bitcast(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Read each number as others of as many bytes."""
    (layout,) = summed(layouts)
    if node.inputs[0].dtype.size != node.outputs[0].dtype.size:
        return whole(node) if layout == WHOLE else None
    return Plan([layout], [layout])


@rule("Select")
def select(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Select by a condition that may be a vector of rows, as ``SelectV2`` does."""
    condition, x = node.inputs[:2]
    if condition.rank == x.rank:
        return each_element(node, layouts, rows)
    layouts = summed(layouts)
    found = [lay for lay in layouts if isinstance(lay, Sharded)]
    if not found:
        return whole(node)
    if condition.rank == 1 and found[0].axis == 0:
        return Plan([found[0]] * 3, [found[0]])
    return (
        Plan([WHOLE, found[0], found[0]], [found[0]]) if condition.rank == 0 else None
    )


@shape_rule("Select")
def _selected(node: Node) -> Shapes:
    """Return the shape of both values: the condition is as large, or has their first axis."""
    of_both = [v.shape for v in node.inputs[1:] if v.shape is not None]
    if len({len(shape) for shape in of_both}) != 1:
        return None
    return [tuple(agreed(of_axis) for of_axis in zip(*of_both, strict=True))]
