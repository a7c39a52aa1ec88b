"""One rank: runs the examples for Horovod one after the other, with one word replaced.

    python -m collective.launch -np 2 python tests/collective/horovod_examples.py

Another word may be given, and the examples to run.
"""

import importlib
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "horovod"


def main(word="collective", *chosen):
    hvd = importlib.import_module(f"{word}.tensorflow")
    sys.argv[1:] = []
    for file in sorted(EXAMPLES.glob("*.py")):
        if chosen and file.stem not in chosen:
            continue
        source = file.read_text()
        assert "import horovod.tensorflow" in source
        code = compile(source.replace("horovod.", f"{word}."), file, "exec")
        names = {"__name__": "__main__", "__file__": str(file)}
        exec(code, names)
        if "model" in names:
            weights = np.concatenate([w.ravel() for w in names["model"].get_weights()])
            everyone = np.array(hvd.allgather_object(weights))
            assert np.isfinite(everyone).all() and (everyone == everyone[0]).all()
            assert names["losses"][-1] < names["losses"][0]
        if hvd.rank() == 0:
            print(f"{file.name}: passed on {hvd.size()} ranks", flush=True)
        hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
