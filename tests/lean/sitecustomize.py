"""What a process that a test starts does first: it has Keras import less.

Keras imports scikit-learn, SciPy and matplotlib, where they are installed, for a few
functions that no test calls: two fifths of the processor time of its own import, in
hundreds of processes. Who else imports them gets them. And Python collects garbage less
often: to import and to trace makes millions of objects that live on. A rank need not
import Keras at all where forkserver.py has.
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
    """Finds nothing; to Keras, what it need not import is not installed."""

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
