"""Loops and branches: their functions are partitioned like the graph around them.

The layouts of a loop's variables are a fixpoint: a variable that comes back in another
layout than it began with is kept in one that both can be turned into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.training.keras_compat import tensorflow_names
from collective.training.partition.emission import Emission
from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.layouts import (
    OWNED,
    SUM,
    WHOLE,
    Layout,
    Listed,
    Partial,
    Shape,
    Sharded,
)
from collective.training.partition.propagation import (
    NeedsWholeLists,
    Plan,
    Rows,
    is_whole,
    propagate,
    rule,
)
from collective.training.partition.sizes import Size

# A loop whose layouts change more often than this is run whole.
_MOST_ROUNDS = 20


@rule("While", "StatelessWhile")
def loop(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """The body for each replica's part of the variables."""
    condition, body = node.bodies
    first = [_startable(layout) for layout in layouts]
    now = list(first)
    _describe(body, node.inputs)
    for _ in range(_MOST_ROUNDS):
        # What fills a list that began empty is asked again: it may have changed.
        trial = [
            Listed() if isinstance(begin, Listed) and begin.element is None else layout
            for begin, layout in zip(first, now, strict=True)
        ]
        propagate(body, trial, rows)
        after = [value.layout for value in body.outputs]
        found = [_joined(a, b) for a, b in zip(trial, after, strict=True)]
        settled = _settle_shapes(body)
        if found == now and settled:
            break
        now = found
    else:
        return None
    propagate(body, now, rows)
    _check_lists(now, body, node)
    _describe(condition, node.inputs, body)
    propagate(condition, now, rows)
    for out, of_body in zip(node.outputs, body.inputs, strict=True):
        if out.shape is None or not out.is_static:
            out.shape = _outside(of_body, out)
    parallel = node.attr("parallel_iterations")

    def joint(emission: Emission, inputs: list[Any]) -> tuple[list[Any], tf.Operation]:
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


@rule("If", "StatelessIf", "Case", "StatelessCase")
def branches(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Each branch for each replica's part; the outputs lie as in both."""
    inside = [_startable(layout) for layout in layouts[1:]]
    ends = []
    for body in node.bodies:
        _describe(body, node.inputs[1:])
        propagate(body, inside, rows)
        ends.append([value.layout for value in body.outputs])
    made = [_met(list(of)) for of in zip(*ends, strict=True)]
    for body in node.bodies:
        _check_lists(made, body, node)
    for place, out in enumerate(node.outputs):
        shapes = [body.outputs[place].shape for body in node.bodies]
        if shapes[0] is not None and all(shape == shapes[0] for shape in shapes):
            out.shape = shapes[0]
    is_if = node.type in ("If", "StatelessIf")

    def joint(emission: Emission, inputs: list[Any]) -> tuple[list[Any], tf.Operation]:
        count = emission.traffic.exchanges
        (index, *_), *rest = inputs
        rest, widths = _widened(emission, node.bodies[0].inputs, inside, rest)
        kind = tensorflow_names.Branch
        functions = [
            _function(emission, body, rest, inside, widths, made, kind)
            for body in node.bodies
        ]
        stateful = not node.type.startswith("Stateless")
        stateful = stateful or emission.traffic.exchanges > count
        if is_if:
            functions.reverse()  # the branch of false is number 0
            index = tf.cast(_truth(index), tf.int32)
        extras = _share_captures(functions)
        given = [emission.share.vector, *_flat(rest), *extras]
        outputs, op = tensorflow_names.make_branches(
            index, given, functions, stateful=stateful
        )
        return _unflat(outputs, [emission.width(lay) for lay in made]), op

    return Plan([WHOLE, *inside], made, joint=joint)


def _truth(value: tf.Tensor) -> tf.Tensor:
    """What ``If`` takes a scalar for."""
    return value if value.dtype == tf.bool else tf.not_equal(value, 0)


def _startable(layout: Layout) -> Layout:
    """The layout in which a variable of this one enters."""
    return WHOLE if isinstance(layout, Partial) and layout != SUM else layout


def _joined(a: Layout, b: Layout) -> Layout:
    """The layout of a variable that begins as ``a`` and comes back as ``b``."""
    if a == b:
        return a
    if isinstance(a, Listed) and isinstance(b, Listed):
        if a.element is None:
            return b
        if b.element is None:
            return a
        return b.met(a) if a.element == WHOLE else a.met(b)
    if a == WHOLE:
        return b if isinstance(b, Sharded) or b == SUM else WHOLE
    if isinstance(a, Sharded):
        return a if b == WHOLE or isinstance(b, Partial) else WHOLE
    return SUM if a == SUM and b == WHOLE else WHOLE


def _met(layouts: list[Layout]) -> Layout:
    """The layout of a value that comes from several branches."""
    first = layouts[0]
    if any(isinstance(layout, Listed) for layout in layouts):
        return next((lay for lay in layouts if lay != Listed()), first)
    if all(layout == first for layout in layouts):
        return _startable(first)
    found = {layout for layout in layouts if layout != WHOLE}
    if len(found) == 1 and (isinstance(one := found.pop(), Sharded) or one == SUM):
        return one
    return WHOLE


def _check_lists(wanted: Sequence[Layout], body: Graph, node: Node) -> None:
    """Lists cannot be turned into another layout."""
    for layout, value in zip(wanted, body.outputs, strict=True):
        have = value.layout
        if not (isinstance(have, Listed) and isinstance(layout, Listed)):
            continue
        if have.element not in (layout.element, WHOLE, None):
            raise NeedsWholeLists(node)


# --- what is known of the values inside ----------------------------------------------


def _describe(
    body: Graph, outer: Sequence[Value], loop_body: Graph | None = None
) -> None:
    """Gives the inputs of a function what is known of the values it is called with.

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


def _settle_shapes(body: Graph) -> bool:
    """Whether every variable of a loop keeps its shape; those that do not become open."""
    settled = True
    for value, after in zip(body.inputs, body.outputs, strict=True):
        if value.shape == after.shape or value.is_handle or value.shape is None:
            continue
        shape: Shape = None
        if after.shape is not None and value.rank == after.rank:
            sharded = getattr(value.layout, "axis", None)
            shape = tuple(
                a if a == b or axis == sharded else value.symbol(axis)
                for axis, (a, b) in enumerate(
                    zip(value.shape, after.shape, strict=True)
                )
            )
        settled = settled and shape == value.shape
        value.shape = shape
    return settled


def _outside(value: Value, out: Value) -> Any:
    """The shape of a loop's output: without symbols of the inside."""
    if value.shape is None:
        return out.shape
    return tuple(
        out.symbol(axis)
        if isinstance(size, Size) and any(_is_of(s, value) for s in size.symbols)
        else size
        for axis, size in enumerate(value.shape)
    )


def _is_of(symbol: Any, value: Value) -> bool:
    return symbol.origin is not None and symbol.origin[0] is value


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
    """A ``FuncGraph`` of a body, whose first input is the vector of the share.

    Args:
        layouts, widths: Of its inputs, and how many tensors each has.
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


def _share_captures(functions: Sequence[Any]) -> list[tf.Tensor]:
    """Gives all functions the tensors that any of them took from around it.

    Returns:
        Those tensors, which are passed behind the other inputs.
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
    """Splits tensors into lists of these lengths."""
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
    """The tensors of each value, as many as in every round; and how many.

    Of a variable there are as many handles as it has copies.
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
