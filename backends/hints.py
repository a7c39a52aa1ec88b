"""What to type, as hints say it."""

from __future__ import annotations

import os
import sys


def python() -> str:
    """``python script.py``, with the name of the script that runs.

    Without a script, as in a notebook or with ``python -m``, it is called script.py.
    """
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    known = name.endswith(".py") and name != "__main__.py"
    return f"python {name if known else 'script.py'}"
