"""Attributes of other people's objects, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replacing(owner: Any, name: str, value: Any, new: bool = False) -> Iterator[None]:
    """Give an attribute another value inside the context.

    Args:
        owner: A class, a module or an object.
        new: Whether the owner may lack the attribute.

    Raises:
        AttributeError: The owner lacks it, and ``new`` is false.
    """
    if not new and not hasattr(owner, name):
        raise AttributeError(f"{owner} has no attribute {name!r} to replace")
    before = vars(owner).get(name, _ABSENT)  # a method as it is, not as it is bound
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
