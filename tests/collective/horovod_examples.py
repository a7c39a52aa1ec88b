"""One rank: runs the examples for Horovod one after another, with one word replaced.

    python -m collective.launch -np 2 python tests/collective/horovod_examples.py
    horovodrun --gloo -np 2 python tests/collective/horovod_examples.py horovod

Rank 0 prints the outcome of each as JSON: its losses, or the error.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "horovod"
# Examples that Horovod 0.28.1 itself cannot run on Keras 3, and its errors.
BEYOND_HOROVOD = {
    # KerasState calls optimizer.variables().
    "elastic_fit": "'list' object is not callable",
    # LearningRateWarmupCallback calls the former keras.backend.get_value.
    "keras_fit": "module 'keras.backend' has no attribute 'get_value'",
}


def main(word="collective"):
    hvd = importlib.import_module(f"{word}.tensorflow")
    sys.argv[1:] = []
    for file in sorted(EXAMPLES.glob("*.py")):
        result = None
        try:
            result = losses_of(file, word, hvd)
        except Exception as error:
            if word == "collective" or file.stem not in BEYOND_HOROVOD:
                raise
            result = str(error)
        if hvd.rank() == 0:
            print(f"\n{file.stem} came to {json.dumps(result)}", flush=True)
        hvd.shutdown()


def losses_of(file, word, hvd):
    """Return all losses of an example; check that ranks hold the same weights."""
    source = file.read_text()
    assert "import horovod.tensorflow" in source
    code = compile(source.replace("horovod.", f"{word}."), file, "exec")
    names = {"__name__": "__main__", "__file__": str(file)}
    exec(code, names)
    if "model" in names:
        weights = np.concatenate([w.ravel() for w in names["model"].get_weights()])
        everyone = np.array(hvd.allgather_object(weights))
        assert np.isfinite(everyone).all() and (everyone == everyone[0]).all()
    losses = [float(loss) for loss in names.get("losses", [])]
    assert not losses or losses[-1] < losses[0]
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
