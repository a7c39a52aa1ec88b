"""Refuses Keras on a backend other than TensorFlow; imported before Keras is.

Raises:
    UsageError: Another backend is set; the error names the setting.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from collective.errors import UsageError


def configured_backend() -> tuple[str, str]:
    """Return Keras' backend, now or once it is imported, and what sets it."""
    if keras := sys.modules.get("keras"):
        with contextlib.suppress(AttributeError):  # Keras is being imported
            return keras.config.backend(), "the program, which has imported Keras"
    if name := os.environ.get("KERAS_BACKEND"):
        return name, "KERAS_BACKEND"
    home = os.path.expanduser("~")  # as Keras looks for its folder
    home = home if os.access(home, os.W_OK) else "/tmp"
    folder = os.environ.get("KERAS_HOME") or Path(home, ".keras")
    file = Path(folder, "keras.json")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads(file.read_text()).get("backend") or "tensorflow", str(file)
    return "tensorflow", "default"


name, _by = configured_backend()
if name != "tensorflow":
    raise UsageError(
        f"Keras' backend is {name!r}, by {_by}: only Keras on TensorFlow can be "
        "distributed",
        hint="KERAS_BACKEND=tensorflow",
    )
