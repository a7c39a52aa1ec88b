"""The numbers in a traced graph, by which the ranks compare what they are about to run."""

from __future__ import annotations

import hashlib

import tensorflow as tf

from collective.training.traced import nodes_of


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
