"""Trainings, at the start of which a rank dies, one by one; run by ``test_killing``.

    ranks_start.py SHARE...

For each share, one of the remaining ranks kills itself after that share of its exchanges
before the first step. The losses equal the undisturbed ones each time.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

from collective import backends
from collective.backends.native import NativeBackend
from collective.training.observers.elastic.fit_units import FitUnits
from tests.training.elastic import exchanges
from tests.training.small import everything, rows, train

STEPS = 4
_run_step = FitUnits.run_step


def reported(units: FitUnits, *step: Any) -> Any:
    *_, number = step
    if number == 0:
        begun.append(exchanges.made)
    return _run_step(units, *step)


def begins_with(backend: NativeBackend) -> list[float]:
    """Return the losses of a training with a random order and a random layer."""
    exchanges.made = 0
    keras.utils.set_random_seed(3)
    return train(backend, steps=STEPS, model=everything(), data=rows()).losses


exchanges.count()
FitUnits.run_step = reported
begun: list[int] = []
keras.config.set_floatx("float64")
job = backends.get()
whole = begins_with(job)
for number, share in enumerate(map(float, sys.argv[1:])):
    begins_with(job)  # with fewer ranks fewer exchanges
    dies = job.rank == number % job.size
    exchanges.deadly = 1 + int(share * (begun[-1] - 1)) if dies else 0
    np.testing.assert_allclose(begins_with(job), whole, rtol=1e-12)
    exchanges.deadly = 0
    print(f"rank {job.rank} of {job.size}: same after {share} of {begun[-1]}")
