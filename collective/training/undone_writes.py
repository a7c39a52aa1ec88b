"""Code that writes variables, and leaves them as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from collective.replacements import replacing

# Both define some of them.
_CLASSES = (
    resource_variable_ops.BaseResourceVariable,
    resource_variable_ops.ResourceVariable,
)
_WRITES = [
    (kind, name)
    for kind in _CLASSES
    for name in vars(kind)
    if name.startswith(("assign", "scatter_", "batch_scatter"))
]


@contextlib.contextmanager
def undo_writes() -> Iterator[dict[str, Any]]:
    """Restores, at its end, every variable that was written inside.

    Yields:
        The names of the written variables, with their values before; it grows.
    """
    written: dict[int, tuple[Any, tf.Tensor]] = {}
    names: dict[str, Any] = {}

    def recording(method: Any) -> Any:
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) not in written:
                with tf.init_scope():
                    before = tf.identity(self)
                written[id(self)] = self, before
                names[self.name] = before
            return method(self, *args, **kwargs)

        return write

    try:
        with contextlib.ExitStack() as stack:
            for kind, name in _WRITES:
                method = recording(getattr(kind, name))
                stack.enter_context(replacing(kind, name, method))
            yield names
    finally:
        for variable, before in written.values():
            variable.assign(before)
