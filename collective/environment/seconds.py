"""Times that environment variables set."""

from __future__ import annotations

import math
import os

from collective.errors import UsageError

TIMEOUT = "COLLECTIVE_TIMEOUT"  # for which ranks wait for each other
START_TIMEOUT = "COLLECTIVE_START_TIMEOUT"  # the same while ranks start
TIMEOUT_SECONDS, START_SECONDS = 600.0, 60.0


def seconds(variable: str, otherwise: float, text: str = "") -> float:
    """Return the time that a variable sets.

    Args:
        otherwise: The time if the variable is not set, or empty.
        text: The value to read; by default the value in the environment.

    Raises:
        UsageError: If the value is not a positive number.
    """
    text = text or os.environ.get(variable, "") or str(otherwise)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not found > 0:
        raise UsageError(
            f"{variable}={text} is no time",
            hint=f"give seconds, as in {variable}=90",
        )
    return found
