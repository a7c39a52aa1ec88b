"""The files of ``--json``: written whole or not at all, with null for Inf and NaN."""

from __future__ import annotations

import contextlib
import json
import math
import os
from typing import Any

import numpy as np

from collective.errors import CollectiveError, UsageError


def check_writable(option: str, path: str) -> None:
    """Refuse a file that cannot be written, before the work that makes its content.

    Raises:
        UsageError: Its folder does not exist, or is not writable.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"{option}: {path} cannot be written",
            hint=f"{option} FILE in a folder that exists and is writable",
        )


def write_json(path: str, content: Any) -> None:
    """Write a JSON file; floats are exact, or null if they are not finite.

    Raises:
        CollectiveError: The file cannot be written; no partial file remains.
    """
    text = json.dumps(_finite_or_none(content), indent=1, allow_nan=False)
    whole = not os.path.exists(path) or os.path.isfile(path)
    # A device or a pipe is written directly. A file is written next to it first, under
    # a name that no other process can have taken.
    part = f"{path}.{os.urandom(8).hex()}.part" if whole else path
    try:
        with open(part, "x" if whole else "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        if whole:
            os.replace(part, path)
    except OSError as error:
        if whole:
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise CollectiveError(
            f"{path} cannot be written: {error.strerror}",
            hint="--json FILE in a writable folder with free space",
        ) from error


def _finite_or_none(value: Any) -> Any:
    """Convert values that JSON lacks: Inf and NaN to None, arrays to lists."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite_or_none(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(v) for v in value]
    return value
