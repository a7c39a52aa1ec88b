"""The first code in each process of the tests: it has Keras import less.

Keras imports scikit-learn, SciPy and matplotlib, if they are installed, for a few functions
that no test calls. This takes two fifths of the processor time of its own import, in hundreds
of processes. Other importers get these packages. Python also collects garbage less often,
because an import and a trace make millions of objects that stay alive. A rank does not have
to import Keras at all if forkserver.py has done so.
"""

import gc
import os
import sys

if server := os.environ.get("COLLECTIVE_TEST_FORKSERVER"):
    import forkserver

    forkserver.hand_over(server)

gc.set_threshold(100_000, 50, 50)

SKIPPED = {"sklearn", "scipy", "matplotlib"}
KERAS = ("keras.", "tensorflow.python.keras.")


class SkippedByKeras:
    """Finds nothing, so that for Keras these packages are not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in SKIPPED and _importer().startswith(KERAS):
            raise ModuleNotFoundError(f"{name} is skipped", name=name)


def _importer() -> str:
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


sys.meta_path.insert(0, SkippedByKeras)
