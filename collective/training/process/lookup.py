"""Imports a function that a user names as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from collective.errors import UsageError


def lookup(what: str) -> Callable[..., Any]:
    """Return the function of ``module:function``; the current directory is searched, too.

    An error that the module itself raises on import passes through unchanged, because it
    is about the user's own code.
    """
    module_name, _, name = what.partition(":")
    # ``python script.py`` searches the folder of the script first; our command does so, too.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only if the named module is missing, and not one that it imports.
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise
        raise UsageError(
            f"{what}: there is no module {module_name!r}",
            hint="name it as Python imports it, from the folder you start in: "
            "folder/my_code.py is folder.my_code:FUNCTION",
        ) from None
    except (ValueError, TypeError):
        raise UsageError(
            f"{what!r} does not name a function",
            hint="write module:function, as in my_code:build",
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        offered = [
            n
            for n, f in vars(module).items()
            if inspect.isfunction(f) and f.__module__ == module_name and n[0] != "_"
        ]
        raise UsageError(
            f"{what}: module {module_name} has no function {name!r}",
            hint=f"it has: {', '.join(offered)}"
            if offered
            else f"define {name or 'one'} in {module.__file__}",
        )
    return function


def call(function: Callable[..., Any], **offered: Any) -> Any:
    """Call a function with those keyword arguments that it accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**offered)
    taken = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    return function(**{k: v for k, v in offered.items() if k in taken})
