"""Operations of a graph that do not record the lines of Python that made them.

TensorFlow walks the whole stack for each operation, for the text of errors that the operation
may raise when it runs. Under pytest and Keras this is more than a hundred frames: a twentieth
of the processor time of all tests that trace a model.
"""

from __future__ import annotations


def forget() -> None:
    """Give all operations of this process the same stack, which is read once."""
    from tensorflow.python.util import tf_stack

    stack = tf_stack.extract_stack()
    tf_stack.extract_stack = lambda stacklevel=1: stack
