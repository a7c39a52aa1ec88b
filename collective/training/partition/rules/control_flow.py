"""Loops and branches: their functions are partitioned like the graph around them.

The layouts of a loop's variables are a fixpoint: a variable that comes back in another
layout than it began with is kept in one that both can be turned into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.emission import Emission
from collective.training.partition.graph import Graph, Node, Sizes, Value
from collective.training.partition.layouts import (
    OWNED,
    SUM,
    WHOLE,
    Layout,
    Listed,
    OpenShape,
    Partial,
    Shape,
    Sharded,
    is_convertible,
    is_whole,
    shared_shape,
)
from collective.training.partition.plans import NeedsWholeLists, Plan, Rows, rule
from collective.training.partition.propagation import propagate
from collective.training.partition.sizes import Size

# A loop whose layouts change more often than this is run whole.
_MOST_ROUNDS = 20


@rule("While", "StatelessWhile")
def loop(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Run the body for each replica's part of the variables."""
    condition, body = node.bodies
    now = _fixpoint(node, layouts, rows)
    if now is None:
        return None
    propagate(body, now, rows)
    if not _all_convertible(body, now, rows):
        return None
    _describe(condition, node.inputs, body)
    propagate(condition, now, rows)
    for out, of_body in zip(node.outputs, body.inputs, strict=True):
        if out.shape is None or not out.is_static:
            out.shape = _outside(of_body.shape, out)
    parallel = node.attr("parallel_iterations")

    def joint(
        emission: Emission, inputs: list[list[tf.Tensor]]
    ) -> tuple[list[list[tf.Tensor]], tf.Operation]:
        count = emission.traffic.exchanges
        inputs, widths = _widened(emission, body.inputs, now, inputs)
        kind = tensorflow_names.LoopBody
        made_body = _function(emission, body, inputs, now, widths, now, kind)
        kind = tensorflow_names.LoopCondition
        made_condition = _function(
            emission, condition, inputs, now, widths, [WHOLE], kind
        )
        exchanges = emission.traffic.exchanges > count
        extras = _share_captures([made_body, made_condition])
        made_body.outputs += made_body.inputs[len(made_body.inputs) - len(extras) :]
        made_body.structured_outputs = made_body.outputs
        outputs = tensorflow_names.make_while(
            [emission.share.vector, *_flat(inputs), *extras],
            made_condition,
            made_body,
            stateful=node.type == "While" or exchanges,
            parallel_iterations=1 if exchanges else parallel,
        )
        return _unflat(outputs[1:], widths), outputs[0].op

    return Plan(now, now, joint=joint)


def _fixpoint(node: Node, layouts: list[Layout], rows: Rows) -> list[Layout] | None:
    """Return the layouts in which the variables of a loop begin and come back, or None."""
    body = node.bodies[1]
    first = [_startable(layout) for layout in layouts]
    now = list(first)
    # What has come back in no other layout stays whole: it may look otherwise again.
    whole: set[int] = set()
    _describe(body, node.inputs)
    for _ in range(_MOST_ROUNDS):
        # What fills a list that began empty is asked again: it may have changed.
        trial = [
            Listed() if isinstance(begin, Listed) and begin.element is None else layout
            for begin, layout in zip(first, now, strict=True)
        ]
        propagate(body, trial, rows)
        found: list[Layout] = []
        for i, layout in enumerate(trial):
            after = body.outputs[i]
            made = _joined(layout, first[i], node.inputs[i], after, rows)
            if isinstance(made, Sharded) and body.inputs[i].rank != after.rank:
                made = WHOLE
            if made == WHOLE != layout:
                whole.add(i)
            found.append(WHOLE if i in whole else made)
        settled = _settle_shapes(body, found)
        if found == now and settled:
            return now
        now = found
    return None


@rule("If", "StatelessIf", "Case", "StatelessCase")
def branches(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Run each branch for each replica's part; the outputs lie as in both."""
    inside = [_startable(layout) for layout in layouts[1:]]
    for body in node.bodies:
        _describe(body, node.inputs[1:])
        propagate(body, inside, rows)
    taken = _branch_taken(node)
    # A branch that is never taken may contradict what is known of the others.
    bodies = node.bodies if taken is None else [node.bodies[taken]]
    ends = list(zip(*(body.outputs for body in bodies), strict=True))
    made = [_met(values, rows) for values in ends]
    if not all(_all_convertible(body, made, rows) for body in bodies):
        return None
    for out, values in zip(node.outputs, ends, strict=True):
        out.shape = _outside(shared_shape([v.shape for v in values]), out)
        if taken is not None and not out.is_handle:
            out.const = values[0].const
            out.sizes = _sizes_outside(values[0].sizes, out)
    is_if = node.type in ("If", "StatelessIf")

    def joint(
        emission: Emission, inputs: list[list[tf.Tensor]]
    ) -> tuple[list[list[tf.Tensor]], tf.Operation]:
        count = emission.traffic.exchanges
        (index, *_), *rest = inputs
        rest, widths = _widened(emission, node.bodies[0].inputs, inside, rest)
        kind = tensorflow_names.Branch
        functions = [
            _function(emission, body, rest, inside, widths, made, kind)
            for body in bodies
        ]
        stateful = not node.type.startswith("Stateless")
        stateful = stateful or emission.traffic.exchanges > count
        if taken is not None:
            index = tf.constant(0)
        elif is_if:
            functions.reverse()  # the branch of false is number 0
            index = tf.cast(_truth(index), tf.int32)
        extras = _share_captures(functions)
        given = [emission.share.vector, *_flat(rest), *extras]
        outputs, op = tensorflow_names.make_branches(
            index, given, functions, stateful=stateful
        )
        return _unflat(outputs, [emission.width(lay) for lay in made]), op

    return Plan([WHOLE, *inside], made, joint=joint)


def _branch_taken(node: Node) -> int | None:
    """Return the number of the branch that is taken in every step, or None if it depends."""
    which = node.inputs[0].const
    if which is None or which.ndim or which.dtype.kind not in "biuf":
        return None
    if node.type in ("If", "StatelessIf"):
        return 0 if which else 1
    last = len(node.bodies) - 1
    return int(which) if 0 <= which <= last else last


def _truth(value: tf.Tensor) -> tf.Tensor:
    """Return what ``If`` takes a scalar for."""
    return value if value.dtype == tf.bool else tf.not_equal(value, 0)


def _startable(layout: Layout) -> Layout:
    """Return the layout in which a variable of this one enters."""
    return WHOLE if isinstance(layout, Partial) and layout != SUM else layout


def _joined(
    now: Layout, first: Layout, begin: Value, after: Value, rows: Rows
) -> Layout:
    """Return the layout of a variable that is tried as ``now`` and comes back as ``after``.

    Args:
        first: The layout in which it begins.
        begin: Its value before the loop.
    """
    back = after.layout
    if isinstance(now, Listed) and isinstance(back, Listed):
        return _met_lists([now, back])
    want = back if now == WHOLE else now
    if want == back and want == first:
        return want
    if not (isinstance(want, Sharded) or want == SUM) or isinstance(first, Listed):
        return WHOLE
    if back != want and isinstance(back, Sharded):
        return WHOLE  # along another axis: it would be gathered in every round
    both = [(first, begin.shape), (back, after.shape)]
    if all(is_convertible(lay, want, shape, rows.rows) for lay, shape in both):
        return want
    return WHOLE


def _met(values: Sequence[Value], rows: Rows) -> Layout:
    """Return the layout of a value that comes from several branches."""
    layouts = [value.layout for value in values]
    if any(isinstance(layout, Listed) for layout in layouts):
        return _met_lists(layouts)
    found = dict.fromkeys(lay for lay in layouts if lay != WHOLE)
    if len(found) != 1:
        return WHOLE
    one = _startable(next(iter(found)))
    is_same_rank = len({value.rank for value in values}) == 1
    if isinstance(one, Sharded) and not is_same_rank:
        return WHOLE
    if all(is_convertible(v.layout, one, v.shape, rows.rows) for v in values):
        return one
    return WHOLE


def _met_lists(layouts: Sequence[Layout]) -> Layout:
    """Return a list from several places: as the one whose elements are shared out."""
    found = Listed()
    for layout in layouts:
        if not isinstance(layout, Listed):
            return WHOLE
        if layout.element is None:
            continue
        if found.element is None:
            found = layout
        else:
            found = layout.met(found) if is_whole(found) else found.met(layout)
    return found


def _all_convertible(body: Graph, wanted: Sequence[Layout], rows: Rows) -> bool:
    """Return whether what a function returns can be had in these layouts.

    Raises:
        NeedsWholeLists: It returns a list that cannot.
    """
    for layout, value in zip(wanted, body.outputs, strict=True):
        if is_convertible(value.layout, layout, value.shape, rows.rows):
            continue
        if isinstance(value.layout, Listed):
            raise NeedsWholeLists(value.node)
        return False
    return True


# --- what is known of the values inside ----------------------------------------------


def _describe(
    body: Graph, outer: Sequence[Value], loop_body: Graph | None = None
) -> None:
    """Give the inputs of a function what is known of the values it is called with.

    Args:
        loop_body: Of the condition of a loop: the body, whose inputs it has.
    """
    for place, (value, given) in enumerate(zip(body.inputs, outer, strict=True)):
        value.forget()
        if loop_body is not None:
            given = loop_body.inputs[place]
        if value.is_handle:
            value.source = given.source  # which says what it stands for
            continue
        value.shape = given.shape if given.shape is not None else value.shape
        stays = len(body.outputs) != len(body.inputs) or loop_body is not None
        stays = stays or body.outputs[place] is value
        if stays:
            value.const, value.sizes = given.const, given.sizes


def _settle_shapes(body: Graph, layouts: Sequence[Layout]) -> bool:
    """Return whether every variable of a loop keeps its shape; those that do not become open.

    Args:
        layouts: Of the variables: a sharded axis has its places before and after.
    """
    settled = True
    for value, after, layout in zip(body.inputs, body.outputs, layouts, strict=True):
        if value.shape == after.shape or value.is_handle or value.shape is None:
            continue
        shape: Shape = None
        if after.shape is not None and value.rank == after.rank:
            sharded = layout.axis if isinstance(layout, Sharded) else None
            shape = tuple(
                a if a == b or axis == sharded else value.symbol(axis)
                for axis, (a, b) in enumerate(
                    zip(value.shape, after.shape, strict=True)
                )
            )
        settled = settled and shape == value.shape
        value.shape = shape
    return settled


def _outside(shape: OpenShape, out: Value) -> Shape:
    """Return the shape of an output of a loop or branch: without symbols of the inside."""
    if shape is None:
        return out.static_shape()
    known = out.static_shape() or (None,) * len(shape)
    return tuple(
        old
        if isinstance(old, int)
        else out.symbol(axis)
        if size is None or (isinstance(size, Size) and _is_inside(size, out))
        else size
        for axis, (size, old) in enumerate(zip(shape, known, strict=True))
    )


def _sizes_outside(sizes: Sizes, out: Value) -> Sizes:
    """Return the sizes that an output holds, or None if one is known inside alone."""
    table = np.array(sizes, object)
    inside = [isinstance(size, Size) and _is_inside(size, out) for size in table.flat]
    return None if any(inside) else sizes


def _is_inside(size: Size, out: Value) -> bool:
    """Return whether a size is one of a function of the loop or branch that makes ``out``."""
    if size.is_lasting:
        return False
    assert out.node is not None
    inner = {value for body in out.node.bodies for value in body.values()}
    return bool(size.origins & inner)


# --- making the functions ------------------------------------------------------------


def _function(
    emission: Emission,
    graph: Graph,
    given: Sequence[list[tf.Tensor]],
    layouts: Sequence[Layout],
    widths: Sequence[int],
    wanted: Sequence[Layout],
    kind: Any,
) -> Any:
    """Return a ``FuncGraph`` of a body, whose first input is the vector of the share.

    Args:
        layouts, widths: The layouts of its inputs, and how many tensors each has.
        wanted: The layouts of its outputs.
    """
    is_body = kind is tensorflow_names.LoopBody
    is_condition = kind is tensorflow_names.LoopCondition
    function = kind(tensorflow_names.new_name("partitioned"))
    with function.as_default():
        vector = tf.compat.v1.placeholder(tf.int64, emission.share.vector.shape)
        inner = Emission(
            graph,
            emission.share.within(vector),
            emission.rows,
            emission.exchange,
            emission.traffic,
            emission,
        )
        inputs = [vector]
        for value, layout, width, outer in zip(
            graph.inputs, layouts, widths, given, strict=True
        ):
            tensors = [_placeholder(value, layout, outer[0]) for _ in range(width)]
            inputs += tensors
            inner.put(value, layout, tensors)
        made = inner.run(wanted)
        if not is_condition:
            made, _ = _widened(emission, graph.outputs, wanted, made)
        results = [tf.identity(t) for t in _flat(made)]
        function.inputs = inputs
        function.outputs = [tf.identity(vector), *results] if is_body else results
        function.structured_outputs = function.outputs
        function.control_outputs = inner.effects()
    return function


def _placeholder(value: Value, layout: Layout, outer: tf.Tensor) -> tf.Tensor:
    if layout == OWNED:
        made = tf.compat.v1.placeholder(value.dtype, outer.shape)
        if value.is_handle:  # of a variable that holds a piece
            tensorflow_names.copy_handle_data(outer, made)
        return made
    shape: Any = None
    if value.is_handle:
        shape = value.source.shape
    elif value.shape is not None:
        sizes = [None if isinstance(size, Size) else size for size in value.shape]
        if isinstance(layout, Sharded):
            sizes[layout.axis] = None
        shape = sizes
    made = tf.compat.v1.placeholder(value.dtype, shape)
    if value.is_handle and is_whole(layout):  # else it says the whole shape of elements
        tensorflow_names.copy_handle_data(value.source, made)
    return made


def _share_captures(functions: Sequence[tf.Graph]) -> list[tf.Tensor]:
    """Give all functions the tensors that any of them took from around it.

    Returns:
        Those tensors, which are passed after the other inputs.
    """
    extras: dict[int, tf.Tensor] = {}
    for function in functions:
        for outer, _ in function.captures:
            extras.setdefault(id(outer), outer)
    for function in functions:
        inside = {id(outer): inner for outer, inner in function.captures}
        with function.as_default():
            for key, outer in extras.items():
                inner = inside.get(key)
                if inner is None:
                    inner = tf.compat.v1.placeholder(outer.dtype, outer.shape)
                    if outer.dtype in (tf.resource, tf.variant):
                        tensorflow_names.copy_handle_data(outer, inner)
                function.inputs.append(inner)
    return list(extras.values())


def _flat(lists: Sequence[list[tf.Tensor]]) -> list[tf.Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _unflat(
    tensors: Sequence[tf.Tensor], widths: Sequence[int]
) -> list[list[tf.Tensor]]:
    """Split tensors into lists of these lengths."""
    rest, found = list(tensors), []
    for width in widths:
        found.append(rest[:width])
        rest = rest[width:]
    return found


def _widened(
    emission: Emission,
    values: Sequence[Value],
    layouts: Sequence[Layout],
    given: Sequence[Any],
) -> tuple[list[list[tf.Tensor]], list[int]]:
    """Return the tensors of each value, as many as in every round; and how many.

    A variable has as many handles as copies.
    """
    widths = [
        len(tensors) if value.dtype == tf.resource else emission.width(layout)
        for value, layout, tensors in zip(values, layouts, given, strict=True)
    ]
    wide = [
        tensors if len(tensors) == width else tensors * width
        for tensors, width in zip(given, widths, strict=True)
    ]
    return wide, widths
