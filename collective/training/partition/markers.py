"""Operations that stand for an exchange along an axis of the mesh.

A pass over a model axis makes the graph of one rank. Its exchanges are not made yet: the
next pass has to see them, to know how their results lie over its own replicas. So each is
an operation with the shapes of its results and two attributes that say what it stands for:
``IdentityN`` for a sum, ``ConcatV2`` of as many copies as there are ranks for a gather. The
last pass, that over the rows, makes collectives of them (``rules.exchanges``).
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from collective.training.keras_compat import tensorflow_names

_AXIS, _KIND = "_mesh_axis", "_mesh_kind"
_CARRIERS = {"IdentityN", "ConcatV2"}
GATHER, FIRST = "gather", "first"
#: By kind, the type of a node; other kinds are a ``MarkedReduction``.
MARKED = {"sum": "MarkedSum", GATHER: "MarkedGather", FIRST: "MarkedFirst"}


class Marker(NamedTuple):
    """What an operation stands for.

    Attributes:
        axis: The name of the mesh's axis.
        kind: That of a partial value (sum, max, ...), ``GATHER`` along the first axis, or
            ``FIRST`` for the values of the axis' first rank.
    """

    axis: str
    kind: str


def mark(op: tf.Operation, marker: Marker) -> None:
    """Have an operation stand for an exchange."""
    tensorflow_names.set_text_attribute(op, _AXIS, marker.axis)
    tensorflow_names.set_text_attribute(op, _KIND, marker.kind)


def marker_of(op: tf.Operation) -> Marker | None:
    """Return what an operation stands for, or None if it stands for itself."""
    if op.type not in _CARRIERS:
        return None
    axis = tensorflow_names.text_attribute(op, _AXIS)
    if axis is None:
        return None
    return Marker(axis, tensorflow_names.text_attribute(op, _KIND) or "")
