"""TensorFlow or Keras is missing, or has no room: advice in place of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from collective.errors import UsageError

_INSTALL = {
    "tensorflow": ("TensorFlow", "pip install tensorflow-cpu"),
    "keras": ("Keras", "pip install keras"),
}
# What the dynamic linker says if a limit leaves a library no address space.
_NO_ROOM = ("failed to map segment", "annot allocate memory")


@contextlib.contextmanager
def explain_missing() -> Iterator[None]:
    """Replace the ImportError of TensorFlow or Keras by advice.

    Raises:
        UsageError: Says what to install, or which limit to lift.
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
    except ImportError as error:
        if not any(words in str(error) for words in _NO_ROOM):
            raise
        raise UsageError(
            f"not enough memory to load TensorFlow: {error}",
            hint="ulimit -v unlimited",
            exit_code=1,
        ) from None
