"""Names the argument that a caller of our functions may have meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def known_arguments(function: F) -> F:
    """Have a function's error for an unknown argument name the nearest known one."""
    known = [*inspect.signature(function).parameters]

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        for name in named.keys() - set(known):
            close = difflib.get_close_matches(name, known, 1)
            meant = f"\nHINT: did you mean {close[0]}?" if close else ""
            raise TypeError(
                f"collective.{function.__name__}() got an unexpected keyword argument "
                f"{name!r}{meant}"
            )
        return function(*args, **named)

    return call  # type: ignore[return-value]
