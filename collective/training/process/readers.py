"""After an error that nothing catches, what reads ahead ends before the interpreter does.

The traceback of the error keeps the iterators of the script's data sets. They would end with
the interpreter, which waits for their threads, while threads that call functions of Python
(``from_generator``, ``tf.numpy_function``, ``tf.py_function``) wait for the lock of the
interpreter. Python alone does not end either, but there nothing else waits: here it is a
whole job.
"""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
from collections.abc import Iterator

import tensorflow as tf


@atexit.register
def end_readers() -> None:
    """End the iterators of ``tf.data`` if an error ends this process."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return
    for one in _chain(
        error
    ):  # calls of TensorFlow that refer to an iterator's resource
        traceback.clear_frames(one.__traceback__)
    kind = tf.data.Iterator  # an abstract class: isinstance() takes ten times as long
    for found in [o for o in gc.get_objects() if kind in type(o).__mro__]:
        vars(found).clear()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            left += one.__cause__, one.__context__
            yield one
