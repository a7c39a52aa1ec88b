"""Results of units in a form that another rank can read: arrays in place of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def portable(result: Any) -> Any:
    """Return a result as another rank can read it: arrays in place of tensors."""
    if isinstance(result, _Tree):
        return result
    leaves = tf.nest.flatten(result, expand_composites=True)
    if not any(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return result
    return _Tree(result)


def opened(result: Any) -> Any:
    """Return what ``portable`` was given."""
    return result._tree if isinstance(result, _Tree) else result


class _Tree:
    """A tree of tensors, which is pickled as arrays."""

    def __init__(self, tree: Any):
        self._tree = tree

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = tf.nest.map_structure(
            lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf,
            self._tree,
            expand_composites=True,
        )
        return _restored, (arrays,)


def _restored(arrays: Any) -> Any:
    return tf.nest.map_structure(
        lambda leaf: (
            tf.constant(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
        ),
        arrays,
        expand_composites=True,
    )
