"""The traced graph of a step: what it is, in a digest, and what it reads and draws.

The graph has all that the user's code comes to: helpers in other modules, settings that
it reads, numbers that it drew. No description of the code is as honest.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat
from collective.training.input.leaves import open_rows
from collective.training.step.rows import Rows
from collective.training.traced import nodes_of

# Numbers that Keras and TensorFlow count up: names of layers and of functions.
_COUNTED = re.compile(r"_\d+(?=[/:_]|$)")
# Python code in the graph, of which it knows a number only.
_OPAQUE = ("PyFunc", "EagerPyFunc", "PyFuncStateless")
_DRAWS = re.compile(
    r"^(RandomStandardNormal|RandomUniform(Int)?|TruncatedNormal|RandomShuffle"
    r"|RandomGammaV?2?|RandomPoissonV2|Multinomial)$"
)


@dataclass(frozen=True)
class Traced:
    """What a graph has."""

    # Of operations, constants and captured tensors; None where it has Python code,
    # which is never seen.
    digest: str | None
    # Random operations of TensorFlow that keep a state of their own.
    draws: tuple[str, ...]
    # Scalar float variables that it reads and that are not in ``known``.
    outside: tuple[tf.Variable, ...]
    # The floating types to which it casts wider numbers.
    rounds_to: frozenset[str] = frozenset()


def trace(
    function: Callable[[Rows], Any], rows: Rows, known: Collection[Any]
) -> Traced | None:
    """Traces a function of rows; None where that fails.

    Args:
        known: Keras variables of the model, trainable or not.
    """
    specs = tf.nest.map_structure(lambda t: open_rows(tf.type_spec_from_value(t)), rows)
    try:
        traced = tf.function(function, autograph=False).get_concrete_function(specs)
    except Exception:
        return None
    graph = traced.graph
    nodes = nodes_of(graph)
    operations = {node.op for node in nodes}
    digest = None
    if not operations.intersection(_OPAQUE):
        digest = hashlib.sha256("\n".join(_texts(nodes, graph)).encode()).hexdigest()
    own = {id(keras_compat.tf_variable(v)) for v in known}
    outside = tuple(
        v
        for v in graph.variables
        if id(v) not in own and v.dtype.is_floating and v.shape.num_elements() == 1
    )
    draws = tuple(sorted(filter(_DRAWS.match, operations)))
    return Traced(digest, draws, outside, frozenset(_rounded(nodes)))


def _rounded(nodes: Iterable[Any]) -> Iterator[str]:
    """The types of casts that drop digits."""
    for node in nodes:
        if node.op == "Cast":
            source, to = (tf.as_dtype(node.attr[key].type) for key in ("SrcT", "DstT"))
            if source.is_floating and to.is_floating and to.size < source.size:
                yield to.name


def _texts(nodes: Any, graph: Any) -> Iterator[str]:
    """A text for each operation and each captured value."""
    for node in nodes:
        yield _plain(f"{node.op} {node.name} {list(node.input)}")
        for name in sorted(node.attr):
            value = node.attr[name]
            if value.HasField("func") or value.list.func:
                yield _plain(f"{name} {value}")
            elif not name.startswith("_"):
                data = value.SerializeToString(deterministic=True)
                yield f"{name} {hashlib.sha256(data).hexdigest()}"
    for outer, _ in graph.captures:
        if outer.dtype in (tf.resource, tf.variant):
            continue
        value = np.asarray(outer) if hasattr(outer, "numpy") else outer
        text = value.tobytes() if isinstance(value, np.ndarray) else b"?"
        yield f"captured {outer.dtype} {outer.shape} {hashlib.sha256(text).hexdigest()}"


def constants(graph: tf.Graph) -> list[str]:
    """Each numeric constant of a graph, in an order that no name decides.

    The same on ranks that have traced the same program. Numbers of NumPy, Python or the
    clock that code draws while it is traced are constants.
    """
    found = []
    for node in nodes_of(graph):
        tensor = node.attr["value"].tensor if node.op == "Const" else None
        if tensor is None or tensor.dtype == tf.string.as_datatype_enum:
            continue
        value = tf.make_ndarray(tensor)
        shown = str(value) if value.size == 1 else f"{value.dtype}{list(value.shape)}"
        found.append(f"{shown} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}")
    return sorted(found)


def _plain(text: str) -> str:
    return _COUNTED.sub("", text)


def kind_of_rows(rows: Rows) -> str:
    """What the rows are like, as far as a loss depends on it: not their numbers.

    Labels to ignore, weights of zero, rows alike: where they come in, a mean may become
    a ratio.
    """
    return str([_kind(leaf) for leaf in tf.nest.flatten(rows, expand_composites=True)])


def _kind(leaf: tf.Tensor) -> str:
    text = f"{leaf.dtype.name}{leaf.shape[1:]}"
    if leaf.dtype == tf.string:
        return text
    values = np.asarray(leaf).astype(np.float64).reshape(-1)
    traits = {
        "negative": np.any(values < 0),
        "zero": np.any(values == 0),
        "not finite": not np.all(np.isfinite(values)),
        "one value": values.size > 1 and np.all(values == values[0]),
        "two values": np.all((values == 0) | (values == 1)),
        "ignored": np.any(np.isin(values, (-100, -1, 255))),
    }
    return text + ",".join(name for name, found in traits.items() if found)


def is_zero(variable: tf.Variable | keras.Variable) -> bool:
    """Whether a scalar is zero: a weight that is raised later, as of an annealed loss."""
    value = np.asarray(variable)
    return value.size == 1 and float(value.reshape(-1)[0]) == 0.0
