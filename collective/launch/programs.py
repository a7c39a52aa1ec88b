"""Where the programs that start ranks are."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def find(name: str) -> str | None:
    """Path of a program of this Python environment, else of one on the PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)
