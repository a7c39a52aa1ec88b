"""Programs written for ``tf.distribute``, over any backend.

``collective.distribute.Strategy("mpi")`` is a ``tf.distribute.Strategy`` whose replicas
are the devices of all ranks. ``python -m collective.distribute script.py`` runs a
script on every rank without edits: ``collective.distribute.command`` is the command line,
and ``collective.distribute.unedited`` prepares Keras in each process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective.distribute.command import EXAMPLE, PROGRAM, main, parser
    from collective.distribute.strategy import Strategy

_HOMES = {
    "collective.distribute.strategy": ("Strategy",),
    "collective.distribute.command": ("EXAMPLE", "PROGRAM", "main", "parser"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["EXAMPLE", "PROGRAM", "Strategy", "main", "parser"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(
            f"module 'collective.distribute' has no attribute {name!r}"
        )
    return getattr(importlib.import_module(_HOME_OF[name]), name)
