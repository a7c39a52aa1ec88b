"""Undoes a ``train_step`` that ended in the middle, if the training continues.

In an elastic job a rank may die between two updates of one step. The ranks that are left
then put back what they had before the step, and make all of it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf


@contextlib.contextmanager
def whole_or_absent(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Put the variables back if the block raises.

    Their values share memory with them until they are written: the copies that this
    costs are those of the variables that the step writes.
    """
    before = [tf.convert_to_tensor(variable) for variable in variables]
    try:
        yield
    except Exception:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        raise
