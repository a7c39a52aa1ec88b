"""The identity and the order of collectives.

Ranks match the collectives of a ``tf.function`` by name. Two runs may share a name only
if every rank runs them in the same order. Three rules give that:

*   A collective's name has the innermost function that contains it, and its number in
    that function's trace. Branches and loop bodies are not functions: they are traced
    with the function around them. A function that is traced again, on one rank only
    or for another shape, gives the same names.
*   Within one graph, collectives of different names are unordered: they overlap with
    each other and with back-propagation. Those of the same name keep their order.
*   A call of a function that contains collectives (also a ``tf.cond`` or a loop) keeps
    its order with all other such calls and with the collectives of the calling graph.
    TensorFlow adds these control dependencies, as if each collective read a variable
    that such a call writes. It adds none to the functions that it generates for a
    gradient tape; ``_order_backward`` does.

The name of a collective's gradient is completed, when it runs, by the ticket of the
forward run: a number that all ranks agree on (``queue.h``). So gradients of different
runs have different names without any order.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from collective import library
from collective.tensorflow_ops.library import (
    CONTROL_FLOW,
    called_functions,
    definition_of,
    gradient_of,
    load_ops,
    register_acd_resource_resolver,
)

_OPS = frozenset(
    f"Collective{kind}"
    for kind in ("AllReduce", "Broadcast", "AllGather", "ReduceScatter", "AllToAll")
)
_KEPT = ("reduction", "algorithm", "transport")  # attributes of an op that is copied


@dataclass
class _Trace:
    """A graph that is being traced, or was traced."""

    plan: int  # the number by which the core knows the names of its collectives
    calls: int = 0  # collectives so far, also in its branches and loop bodies
    # The last op of each process set and name.
    last: dict[tuple[int, str], weakref.ref[tf.Operation]] = field(default_factory=dict)
    ordered: int = 0  # how many of its ops ``_order_backward`` has seen
    # In these, the name of the last op that calls a function with collectives.
    write: list[str] = field(default_factory=list)
    # In these, the names of the collectives after that op.
    reads: list[str] = field(default_factory=list)


_traces: weakref.WeakKeyDictionary[tf.Graph, _Trace] = weakref.WeakKeyDictionary()
# Not from 1, because the functions of a saved model still have the numbers of the
# process that saved it.
_plans = itertools.count(random.SystemRandom().randrange(1, 1 << 30))


def name_of(kind: str, name: str | None) -> str:
    """Return the name by which ranks match a call; empty if they match by order."""
    if tf.executing_eagerly():
        return name or ""
    function, trace = _function()
    trace.calls += 1
    return name or f"{kind} {trace.calls} of {function}"


def attributes(name: str, group: int) -> dict[str, Any]:
    """Return the attributes that identify an op; add it to its function's plan.

    Args:
        name: The result of ``name_of``.
        group: The core's number of the process set.
    """
    eager = tf.executing_eagerly()
    plan = 0
    if not eager:
        function, trace = _function()
        plan = trace.plan
        # Threads may run functions of one name at the same time.
        function += f" in {threading.current_thread().name}"
        library.load().collective_plan(plan, group, function.encode(), name.encode())
    return {
        "process_set": group,
        "in_order": int(eager),
        "plan": plan,
        "tensor_name": name,
    }


def make_op(
    kind: str, *inputs: Any, ticket: tf.Tensor | None = None, **attributes: Any
) -> Any:
    """Make an op.

    Args:
        kind: ``all_reduce``, ``broadcast``, ``all_gather``, ...
        inputs: The op's inputs except the ticket.
        ticket: For a gradient, the ticket of the forward op, int64 ``[]``.
        attributes: The op's attributes, including those that ``attributes`` returned.

    Returns:
        The op's results without its own ticket: a list, a tensor, or several.
    """
    op = getattr(load_ops(), f"collective_{kind}")
    if tf.executing_eagerly():
        name = _as_input(attributes.pop("tensor_name"))
        return _without_ticket(op(*inputs, name, **attributes))
    key = attributes.get("process_set", 0), attributes["tensor_name"]
    graph = tf.compat.v1.get_default_graph()
    last = _trace(graph).last
    before = last[key]() if key in last else None
    if ticket is None:
        ticket = tf.constant(0, tf.int64)
    with tf.control_dependencies([] if before is None else [before]):
        results = op(*inputs, ticket, **attributes)
    last[key] = weakref.ref(results.issued.op)  # does not own the graph
    _order_backward(graph)
    return _without_ticket(results)


def made_again(op: tf.Operation, inputs: Any) -> tf.Operation:
    """Copy the collective of another graph into this one, under a name of its own.

    Args:
        op: An all-reduce or all-gather.
        inputs: Its inputs in this graph, without the ticket.
    """
    given = {attribute.name for attribute in op.op_def.attr}
    kept = {n: op.get_attr(n) for n in _KEPT if n in given}
    is_sum = op.type == "CollectiveAllReduce"
    kind = "all_reduce" if is_sum else "all_gather"
    identity = attributes(name_of(kind, None), op.get_attr("process_set"))
    results = make_op(kind, inputs if is_sum else inputs[0], **kept, **identity)
    return (results[0] if is_sum else results).op


@functools.lru_cache(1024)
def _as_input(name: str) -> tf.Tensor:
    """Return an empty ticket, and an eager op's name as int64 ``[1 + words]``.

    TensorFlow keeps an eager op's kernel for ever, one for each value of its
    attributes, so a name that is new at every call must not be an attribute.
    """
    encoded = name.encode()
    padded = encoded + bytes(-len(encoded) % 8)
    with tf.device("CPU:0"):
        return tf.constant(np.frombuffer(bytes(8) + padded, np.int64))


def given_name(op: tf.Operation) -> str:
    """Return the name of an op that has run or was traced; empty if it has none."""
    ticket = op.inputs[-1]
    if isinstance(ticket, tf.__internal__.EagerTensor):
        return ticket.numpy()[1:].tobytes().rstrip(b"\0").decode()
    return op.get_attr("tensor_name").decode()


def _without_ticket(results: Any) -> Any:
    rest = results[:-1]
    return rest[0] if len(rest) == 1 else rest


def _function() -> tuple[str, _Trace]:
    """Return name and trace of the innermost function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, CONTROL_FLOW):
        graph = graph.outer_graph
    # A graph of TensorFlow 1 has no name. The names that TensorFlow gives to generated
    # functions end with a number that differs between processes.
    name = re.sub(r"^__(\w+?)_(.*)_\d+$", r"\1 of \2", getattr(graph, "name", "graph"))
    return name, _trace(graph)


def _trace(graph: tf.Graph) -> _Trace:
    if graph not in _traces:
        _traces[graph] = _Trace(next(_plans))
    return _traces[graph]


# Collectives read this, and calls of functions with collectives write it. TensorFlow
# only compares it; it is not an input of any op, so nothing is captured and saved
# models need not restore it.
with tf.Graph().as_default():
    _ORDER = tf.compat.v1.placeholder(tf.resource, [], "collective_order")


@register_acd_resource_resolver
def collective_order(op: tf.Operation, reads: Any, writes: Any) -> bool:
    """Extend the reads and writes of an op; return whether that was necessary.

    TensorFlow calls it for each op of a traced function.
    """
    if _ORDER in reads or _ORDER in writes:
        return False
    use = _use(op)
    # This includes functions of which only the gradient has collectives:
    # tf.custom_gradient's ops are IdentityN.
    if op.type == "IdentityN" or any(True for _ in called_functions(op)):
        _order_gradients_of(op)
    if use:
        (reads if use == "read" else writes).add(_ORDER)
    return bool(use)


def _use(op: tf.Operation) -> str:
    """Return ``read`` for a collective, ``write`` for a call of such a function.

    Nothing may wait for ops in control flow of TensorFlow 1: no op runs in a branch
    that is not taken.
    """
    if op._control_flow_context is not None:
        return ""
    if op.type in _OPS:
        return "read"
    calls = any(_has_collectives(function) for function in called_functions(op))
    return "write" if calls else ""


def _order_gradients_of(op: tf.Operation) -> None:
    """Have the ops put in order that are added as the gradient of this op."""
    if getattr(op._gradient_function, "orders", False):
        return
    gradient = gradient_of(op)
    if gradient is None:
        return

    @functools.wraps(gradient)
    def ordered(*arguments: Any) -> Any:
        results = gradient(*arguments)
        _order_backward(tf.compat.v1.get_default_graph())
        return results

    ordered.orders = True  # type: ignore[attr-defined]
    op._gradient_function = ordered


def _order_backward(graph: tf.Graph) -> None:
    """Order the new ops of a function that TensorFlow generates for a tape.

    It adds there the dependencies that TensorFlow adds in traced functions.
    """
    generated = getattr(graph, "name", "").startswith("__backward_")
    if not generated or graph.experimental_acd_manager is not None:
        return
    trace = _trace(graph)
    ops = graph.get_operations()
    new, trace.ordered = ops[trace.ordered :], len(ops)
    for op in new:
        use = _use(op)
        if not use:
            continue
        if use == "read":
            before = trace.write
            trace.reads.append(op.name)
        else:
            before = trace.write + trace.reads
            trace.write, trace.reads = [op.name], []
        op._add_control_inputs([graph.get_operation_by_name(name) for name in before])
        # The previous call of this function has not ended.
        graph.control_outputs.append(op)


@functools.cache
def _has_collectives(function: str) -> bool:
    """Return whether a function, or one that it calls, contains collectives."""
    definition = definition_of(function)
    if definition is None:
        return False
    calls = set()
    for node in definition.node_def:
        if node.op in _OPS:
            return True
        for value in node.attr.values():
            if value.HasField("func"):
                calls.add(value.func.name)
            calls.update(called.name for called in value.list.func)
    return any(_has_collectives(called) for called in calls)
