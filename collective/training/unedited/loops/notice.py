"""Says at the first update of a script's own loop that every rank runs all of it."""

from __future__ import annotations

import functools
import sys
from typing import Any

import tensorflow as tf

from collective.training import keras_compat
from collective.training.unedited.job import LOOP, Job
from collective.training.unedited.loops.step import is_running

NAME = "a training loop of the script's own"
_TEXT = """%s is not distributed: each of the %d processes trains on all rows, alone
HINT: collectiverun --keras --loops cuts the batches of its steps; or in the script
      strategy = collective.distribute.Strategy(), and strategy.run(step, args=...); or
      tape = hvd.DistributedGradientTape(tape), with import collective.tensorflow as hvd"""
# Who imports one of these sums gradients itself.
_DROP_INS = ("collective.tensorflow", "horovod.tensorflow", "horovod.keras")


def warn_of_updates(job: Job) -> None:
    """From now on, the first update outside of ``fit`` is reported on stderr."""
    for owner in keras_compat.optimizers_with_apply():
        job.replace(owner, "apply", _noted(job, owner.apply))


def _noted(job: Job, stock: Any) -> Any:
    @functools.wraps(stock)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = job.inside or is_running() or LOOP in job.used or job.warned(NAME)
        if not (known or _sums_itself()):
            job.warn_once(NAME, _TEXT, job.backend.size)
        return stock(self, *args, **kwargs)

    return apply


def _sums_itself() -> bool:
    """Whether the gradients of the script are summed by other means."""
    return tf.distribute.has_strategy() or any(m in sys.modules for m in _DROP_INS)
