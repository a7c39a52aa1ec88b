"""Commands that run a module of this package, wherever they are started.

``python -m`` puts the working directory first on the path: if others can write there,
their ``argparse.py`` would run as you. Python 3.10 has no ``-P`` yet.
"""

from __future__ import annotations

import sys

# With -c, the first entry is the empty one; PYTHONSAFEPATH leaves it out. No file is
# imported before the entry is removed.
_RUN = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); del sys.argv[0]; "
    "import runpy; runpy.run_module(sys.argv[0], None, '__main__', True)"
)
# Before the import: while modules are imported, Ctrl-C ends the process without a
# traceback.
_SILENTLY = (
    "import signal; signal.getsignal(2) == signal.SIG_IGN or "
    "signal.signal(2, signal.SIG_DFL); "
)


def started() -> bool:
    """Return whether this process runs a command of this kind."""
    return any(word.endswith(_RUN) for word in sys.orig_argv)


def arguments(module: str, *words: str, silently: bool = False) -> list[str]:
    """Return Python's arguments for ``-m module words``, without the working directory.

    Args:
        silently: Whether the module itself says when it starts to handle Ctrl-C.
    """
    return ["-c", _SILENTLY * silently + _RUN, module, *words]


def command(module: str, *words: str, python: str = "") -> list[str]:
    """Return the command that runs a module, by this Python or the one given."""
    return [python or sys.executable, *arguments(module, *words)]
