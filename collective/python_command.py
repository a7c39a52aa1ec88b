"""Commands that run a module of this package, wherever they are started.

``python -m`` puts the working directory first on the path: where others can write there,
their ``argparse.py`` would run as you. Python 3.10 has no ``-P`` yet.
"""

from __future__ import annotations

import sys

# With -c, the first entry is the empty one; PYTHONSAFEPATH leaves it out. Nothing is
# imported from a file before it is gone.
_RUN = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); del sys.argv[0]; "
    "import runpy; runpy.run_module(sys.argv[0], None, '__main__', True)"
)


def started() -> bool:
    """Whether this process runs such a command."""
    return _RUN in sys.orig_argv


def arguments(module: str, *words: str) -> list[str]:
    """What Python takes instead of ``-m module words``, without the working directory."""
    return ["-c", _RUN, module, *words]


def command(module: str, *words: str, python: str = "") -> list[str]:
    """The command that runs a module, by this Python or the one given."""
    return [python or sys.executable, *arguments(module, *words)]
