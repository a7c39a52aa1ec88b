"""One process: runs programs of examples/keras one after another, keeps the models.

    python tests/training/unedited/keras_programs.py FOLDER mlp gan                  stock Keras
    collectiverun -np 2 --keras tests/training/unedited/keras_programs.py FOLDER mlp gan

Rank R writes to FOLDER, for each program: ``NAME.R.txt`` with its output, and ``NAME.R.npz``
with the weights of the model that its ``main`` returned and the variables of its optimizer;
``NAME.R.error`` with a traceback if it failed. ``NAME.keras`` has the files that the program
itself saves. This script does not import modules that change how Keras trains.
"""

import contextlib
import faulthandler
import os
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path

import numpy as np

from collective.environment import detect

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PROGRAMS = EXAMPLES / "keras"
FOLDERS = ("keras", "loops", "distribution")
# A rank that waits so long for another is stuck: the job ends with its traceback.
SECONDS = 400
ALONE_SECONDS = 100


def arrays_of(model) -> dict[str, np.ndarray]:
    """Return the model's weights and its optimizers' variables, in Keras' order."""
    found = {f"{i} {w.path}": np.asarray(w) for i, w in enumerate(model.weights)}
    for name in ("optimizer", "g_optimizer", "d_optimizer"):
        optimizer = getattr(model, name, None)
        for i, variable in enumerate(getattr(optimizer, "variables", [])):
            found[f"{name} {i} {variable.name}"] = np.asarray(variable)
    # Without /, which would make folders in the archive.
    return {name.replace("/", " "): value for name, value in found.items()}


def run(name: str, folder: Path, rank: int) -> None:
    """Run one program as if it were alone, and write its results."""
    import keras

    stem = folder / f"{name}.{rank}"
    sys.argv = [f"{name}.py", str(folder / saved_as(name))]
    keras.utils.clear_session()
    with open(f"{stem}.txt", "w") as file, contextlib.redirect_stdout(file):
        model = load(name)["main"]()
    # The file is renamed when complete, as a sign that the program ended.
    np.savez(f"{stem}.part.npz", **arrays_of(model))
    os.rename(f"{stem}.part.npz", f"{stem}.npz")


def load(name: str) -> dict:
    """Load a program as Python loads a script; return its names."""
    (path,) = (p for f in FOLDERS if (p := EXAMPLES / f / f"{name}.py").exists())
    loader = SourceFileLoader("<run_path>", str(path))
    names = {"__name__": "<run_path>", "__file__": str(path)}
    exec(loader.source_to_code(path.read_bytes(), str(path)), names)
    return names


def saved_as(name: str) -> str:
    """Return the file that a program is asked to save to; one saves only weights."""
    return f"{name}.weights.h5" if name == "own_metrics" else f"{name}.keras"


def end_if_alone(name: str, folder: Path, size: int) -> None:
    """End the job after an error that not all ranks have, since its ranks differ."""
    deadline = time.monotonic() + ALONE_SECONDS
    while len(list(folder.glob(f"{name}.*.error"))) < size:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.1)


def main() -> None:
    folder, place = Path(sys.argv[1]), detect()
    for name in sys.argv[2:]:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            run(name, folder, place.rank)
        except Exception:
            error = traceback.format_exc()
            (folder / f"{name}.{place.rank}.error").write_text(error)
            end_if_alone(name, folder, place.size)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
