"""Methods of Keras that are replaced as long as a distributed optimizer exists.

Keras has no public way to change this behaviour. Other optimizers behave as before, and
Keras' own methods are restored with the end of the last distributed optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

#: A class, the name of a method, and a function from Keras' method to the new one.
Replacement = tuple[type[Any], str, Callable[[Any], Any]]

_living: set[int] = set()
_undo: list[Callable[[], None]] = []


def replace_for(optimizer: Any, replacements: Sequence[Replacement]) -> None:
    """Replace methods until neither this optimizer nor another such one exists."""
    if not _living:
        _undo.extend(_replace(*replacement) for replacement in replacements)
    _living.add(id(optimizer))
    weakref.finalize(optimizer, _release, id(optimizer)).atexit = False


def _release(key: int) -> None:
    _living.discard(key)
    while _undo and not _living:
        _undo.pop()()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace a method; return what restores it, unless others replaced ours."""
    inherits = name not in vars(owner)
    stock = getattr(owner, name)
    ours = make(stock)
    setattr(owner, name, ours)

    def undo() -> None:
        if vars(owner).get(name) is not ours:
            return
        if inherits:
            delattr(owner, name)
        else:
            setattr(owner, name, stock)

    return undo
