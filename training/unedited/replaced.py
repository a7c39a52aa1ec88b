"""Functions of Keras and TensorFlow that ours stand in for, and how to put them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Replaced:
    """Attributes that were replaced, last first."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        """Replaces an attribute of a class or module.

        An attribute that a class has only from a class above it is removed again by
        ``undo``.
        """
        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Puts everything back."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
