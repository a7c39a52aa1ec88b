"""Attributes that are replaced for a while, in the thread that asks for it.

TensorFlow traces the replicas of one process in a thread each, one at a time: a replica
runs until it meets the others (``merge_call``), and goes on when all have been there. A
``with`` block around such a meeting is not nested in those of the other replicas: each
would see what all have replaced, and would restore what another one has put there. So
a replica takes its replacements back before it waits, and makes them again afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


class _Made(threading.local):
    """What this thread has replaced, in order."""

    def __init__(self) -> None:
        self.patches: list[Any] = []


_made = _Made()


@contextlib.contextmanager
def replacing(owner: Any, name: str, value: Any, new: bool = False) -> Iterator[None]:
    """Inside, an attribute has another value.

    Args:
        new: Whether the owner has no such attribute.
    """
    patch, patches = mock.patch.object(owner, name, value, create=new), _made.patches
    patch.start()
    patches.append(patch)
    try:
        yield
    finally:
        if patch in patches:  # else another replica has failed: see ``suspended``
            patches.remove(patch)
            patch.stop()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Inside, what this thread has replaced is as it was.

    After an error it stays so: the threads of the other replicas then end side by side.
    """
    patches, _made.patches[:] = list(_made.patches), []
    for patch in reversed(patches):
        patch.stop()
    yield
    for patch in patches:
        patch.start()
    _made.patches[:] = patches


def suspended_where_replicas_meet() -> contextlib.AbstractContextManager[None]:
    """Around ``strategy.run``: no replica sees what another one has replaced."""
    import tensorflow as tf

    meet, caller = tf.distribute.ReplicaContext.merge_call, threading.get_ident()

    def merge_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == caller:  # a strategy without threads: no other one
            return meet(self, *args, **kwargs)
        with suspended():
            return meet(self, *args, **kwargs)

    return replacing(tf.distribute.ReplicaContext, "merge_call", merge_call)
