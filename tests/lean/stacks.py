"""Operations of a graph that do not remember the lines of Python that made them.

TensorFlow walks the whole stack for each operation, for the words of errors that an
operation may raise when it runs. Below pytest and Keras that is more than a hundred
frames: a twentieth of the processor time of all tests that trace a model.
"""

from __future__ import annotations


def forget() -> None:
    """Gives all operations of this process the same stack, which is read once."""
    from tensorflow.python.util import tf_stack

    stack = tf_stack.extract_stack()
    tf_stack.extract_stack = lambda stacklevel=1: stack
