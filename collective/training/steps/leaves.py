"""The tensors of a batch, and which of them have its rows.

A batch is a tree as Keras' data adapters make it: tensors, ragged and sparse tensors, None.
Each leaf has rows of its own. The leaves with as many rows as most of the batch has are cut
by rows; every other leaf is whole on every rank. A cut never changes what is computed, since
the partition is right for any of them: it decides how much each replica computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.input.pipeline import Batch
from collective.training.keras_compat.tensorflow_names import shape_of
from collective.training.step.rows import packed, rows_of

#: Composite tensors that a batch may hold; their components are whole on every rank.
COMPOSITES = tf.RaggedTensor, tf.SparseTensor
COMPOSITE_SPECS = tf.RaggedTensorSpec, tf.SparseTensorSpec


@dataclass(frozen=True)
class Leaves:
    """The leaves of one batch.

    Attributes:
        kind: A hashable description: the tree, and dtype and shape of each tensor.
        tensors: All dense tensors, components of composite ones included. Of a batch of
            which this process has read its own rows: those, and the number of all, int64.
        data: The batch, with ``None`` for a ``tf.experimental.Optional``.
        rows: Of the whole batch, if this process has read its own only; else None.
        again: Returns the batch after a change of the ranks, of which each has read its
            own rows. If None, it is the same.
    """

    kind: Any
    tensors: list[tf.Tensor]
    data: Any
    rows: int | None = None
    again: Callable[[], Any] | None = None

    @classmethod
    def of(cls, data: Any, again: Callable[[], Any] | None = None) -> Leaves:
        """Read a batch; arrays become tensors of the same dtype."""
        tensors: list[tf.Tensor] = []
        if isinstance(data, Batch):
            kind, read = _read(packed(rows_of(data)), tensors)
            tensors.append(data.global_rows)
            rows = int(data.global_rows)
            return cls((Batch, kind, rows), tensors, read, rows, again)
        kind, read = _read(data, tensors)
        return cls(kind, tensors, read)

    def now(self) -> list[tf.Tensor]:
        """Return what this process has of the batch now; see ``tensors``."""
        return self.tensors if self.again is None else Leaves.of(self.again()).tensors

    @property
    def lengths(self) -> list[int | None]:
        """Return the rows of each dense tensor of the whole batch, or None for a scalar."""
        if self.rows is not None:
            return [self.rows] * (len(self.tensors) - 1)
        return [(shape_of(tensor) or (None,))[0] for tensor in self.tensors]


def _read(node: Any, tensors: list[tf.Tensor]) -> tuple[Any, Any]:
    """Return the description of a tree and the tree with tensors; collect its tensors."""
    if isinstance(node, tf.Tensor):
        tensors.append(node)
        return (node.dtype, shape_of(node)), node
    if node is None or isinstance(node, tf.experimental.Optional):
        return None, None
    if isinstance(node, dict):
        keys = sorted(node)  # the order of tf.nest
        found = {key: _read(node[key], tensors) for key in keys}
        kinds = ((key, found[key][0]) for key in keys)
        filled = type(node)((key, found[key][1]) for key in node)
        return (dict, *kinds), filled
    if isinstance(node, tuple | list):
        children = [_read(child, tensors) for child in node]
        trees = [tree for _, tree in children]
        is_named = hasattr(node, "_fields")
        tree = type(node)(*trees) if is_named else type(node)(trees)
        return (type(node), *(kind for kind, _ in children)), tree
    if isinstance(node, COMPOSITES):
        parts = tf.nest.flatten(node, expand_composites=True)
        tensors += parts
        return (type(node), *((p.dtype, shape_of(p)) for p in parts)), node
    if isinstance(node, np.ndarray | np.generic):
        return _read(tf.convert_to_tensor(node), tensors)
    if hasattr(node, "__array__"):
        return _read(tf.convert_to_tensor(np.asarray(node)), tensors)
    return ("literal", repr(node)), node


def spec_of(data: Any) -> Any:
    """Return the tree of ``tf.TypeSpec`` of a batch; leaves without tensors stay."""
    return tf.nest.map_structure(
        lambda leaf: (
            tf.type_spec_from_value(leaf)
            if isinstance(leaf, (tf.Tensor, *COMPOSITES))
            else leaf
        ),
        data,
    )


def without_optionals(spec: Any) -> Any:
    """Return the specification of a data set with None for each ``Optional``."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec
    )


def dense(spec: Any) -> list[bool]:
    """Return for each tensor of a tree of ``tf.TypeSpec`` whether it may be cut by rows."""
    found = []
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TypeSpec):
            continue
        parts = tf.nest.flatten(leaf, expand_composites=True)
        is_dense = isinstance(leaf, tf.TensorSpec) and leaf.shape.rank not in (0, None)
        found += [is_dense] * len(parts)
    return found


def cut_by_rows(tensors: Sequence[tf.Tensor], can: Sequence[bool]) -> list[bool]:
    """Return which tensors have the rows of the batch.

    These are the tensors whose common length belongs to the most elements, so that as
    much as possible is computed by one replica only.

    Args:
        tensors: The tensors of a batch.
        can: Which of them may be cut; see ``dense``.
    """
    elements: dict[int, int] = {}
    for tensor, may in zip(tensors, can, strict=True):
        if may:
            rows, *others = (size or 0 for size in shape_of(tensor))
            elements[rows] = elements.get(rows, 0) + rows * math.prod(others) + 1
    if not elements:
        return [False] * len(tensors)
    most = max(elements, key=lambda length: elements[length])
    return [
        may and shape_of(tensor)[0] == most
        for tensor, may in zip(tensors, can, strict=True)
    ]
