"""TensorFlow or Keras is missing: the doctor's advice in place of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from collective.errors import UsageError

_INSTALL = {
    "tensorflow": ("TensorFlow", "pip install tensorflow-cpu"),
    "keras": ("Keras", "pip install keras"),
}


@contextlib.contextmanager
def explain_missing() -> Iterator[None]:
    """Replace the ImportError of a missing TensorFlow or Keras by advice.

    Raises:
        UsageError: Says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        found = _INSTALL.get(error.name or "")
        if found is None:
            raise
        name, command = found
        raise UsageError(
            f"{name} is not installed",
            hint=f"{command}; python -m collective.doctor shows what else is missing",
        ) from None
