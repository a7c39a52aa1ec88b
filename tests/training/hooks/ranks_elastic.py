"""An elastic training with a hook: rank 0 leaves, and another rank joins; FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from collective import backends
from tests.training.elastic.ranks_killed import ComesAndGoes
from tests.training.hooks import linear
from tests.training.hooks.test_hooks import ALL


def main(folder: str) -> None:
    backend = backends.get("native", backends.Options(min_np=1))
    result = linear.train(backend, ALL, callbacks=[ComesAndGoes()])
    if backend.rank == 0:
        np.save(Path(folder, "losses.npy"), result.losses)


if __name__ == "__main__":
    main(sys.argv[1])
