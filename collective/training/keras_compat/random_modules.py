"""The function by which NumPy asks the system for a seed."""

from __future__ import annotations

from typing import Any

import numpy as np


def numpy_entropy() -> tuple[Any, str]:
    """Return the module and the name of the function that ``SeedSequence()`` calls."""
    return np.random.bit_generator, "randbits"
