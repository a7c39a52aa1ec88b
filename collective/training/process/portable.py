"""Results of units in a form that another rank, or a later run, can read."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def portable(result: Any) -> Any:
    """Return a result as it can be pickled: tensors in it become arrays."""
    leaves = tf.nest.flatten(result, expand_composites=True)
    if not any(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return result
    return _Tree(result)


def opened(result: Any) -> Any:
    """Return what ``portable`` was given."""
    return result.tree if isinstance(result, _Tree) else result


def is_composite(leaf: Any) -> bool:
    """Return whether a leaf of a result is made of several tensors."""
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)


class _Tree:
    """A tree of tensors, which is pickled as arrays."""

    def __init__(self, tree: Any):
        self.tree = tree

    def __reduce__(self) -> tuple[Any, ...]:
        structure = tf.nest.map_structure(
            lambda leaf: tf.type_spec_from_value(leaf) if is_composite(leaf) else None,
            self.tree,
        )
        leaves = tf.nest.flatten(self.tree, expand_composites=True)
        return _restored, (structure, [_packed(leaf) for leaf in leaves])


def _packed(leaf: Any) -> tuple[Any, str]:
    """Return the array of a tensor and its dtype; another leaf, and no dtype."""
    if isinstance(leaf, tf.Tensor):
        return leaf.numpy(), leaf.dtype.name
    return leaf, ""


def _restored(structure: Any, leaves: list[tuple[Any, str]]) -> _Tree:
    found = [tf.constant(leaf, dtype) if dtype else leaf for leaf, dtype in leaves]
    return _Tree(tf.nest.pack_sequence_as(structure, found, expand_composites=True))
