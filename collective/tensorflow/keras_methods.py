"""Methods inside Keras that are others as long as a distributed optimizer lives.

There is no way to ask Keras for another behaviour. All other optimizers are left alone
meanwhile, and with the last distributed one the methods are Keras' own again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

#: A class, the name of a method, and what makes the new method from Keras' own.
Replacement = tuple[type[Any], str, Callable[[Any], Any]]

_living: set[int] = set()
_undo: list[Callable[[], None]] = []


def replace_for(optimizer: Any, replacements: Sequence[Replacement]) -> None:
    """Replaces methods until neither this optimizer nor another such one lives."""
    if not _living:
        _undo.extend(_replace(*replacement) for replacement in replacements)
    _living.add(id(optimizer))
    weakref.finalize(optimizer, _release, id(optimizer)).atexit = False


def _release(key: int) -> None:
    _living.discard(key)
    while _undo and not _living:
        _undo.pop()()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Returns what puts Keras' own method back, unless others have replaced ours."""
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
