"""Says which loops of a script's own every rank runs whole; refuses what cannot run."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.steps.batch_function import is_running
from collective.training.unedited.script import is_library
from collective.training.unedited.script_job import ScriptJob

_EAGER = """%s is not distributed: each of the %d processes computes its gradients of \
all rows, which is right and takes as long as one process
HINT: put the step into a tf.function that is called with the batch: docs/how-to/loops.md"""
LOOP = "a training loop of the script's own"  # in ScriptJob.used
_TEXT = """%s is not distributed: each of the %d processes trains on all rows, alone
HINT: collectiverun --keras --loops cuts the batches of its steps; or in the script
      strategy = collective.distribute.Strategy(), and strategy.run(step, args=...); or
      tape = hvd.DistributedGradientTape(tape), with import collective.tensorflow as hvd"""
_ELASTIC = """
      If rank 0 dies in it, the others run it to its end, and the script fails then: what \
rank 0 had not printed or written is lost"""
# Who imports one of these sums gradients itself.
_DROP_INS = ("collective.tensorflow", "horovod.tensorflow", "horovod.keras")


def warn_of_updates(job: ScriptJob) -> None:
    """Log the first update of each training loop outside of ``fit``."""
    for owner in keras_compat.optimizers.optimizers_with_apply():
        job.replace(owner, "apply", _noted(job, owner.apply))


def _noted(job: ScriptJob, stock: Any) -> Any:
    @functools.wraps(stock)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (job.inside or is_running() or _sums_itself()):
            job.used.add(LOOP)
            text = _TEXT + (_ELASTIC if job.backend.elastic else "")
            job.warn_once(f"the training loop at {_place()}", text, job.backend.size)
        return stock(self, *args, **kwargs)

    return apply


def warn_of_gradients(job: ScriptJob) -> None:
    """Log where a script computes gradients of a model outside of steps.

    Not updates: those of a step may be applied outside of it.
    """

    def warn() -> None:
        if tf.executing_eagerly() and not (is_running() or _sums_itself()):
            job.warn_once(f"the training step at {_place()}", _EAGER, job.backend.size)

    _before_gradients(job, warn)


def refuse_gradients(job: ScriptJob) -> None:
    """Reject a training loop outside of the replicas of a strategy.

    TensorFlow would only say that a variable has no handle there.
    """

    def refuse() -> None:
        if tf.distribute.in_cross_replica_context():
            raise UsageError(
                f"the training loop at {_place()} computes gradients outside of the "
                f"replicas of backend {job.backend.name!r}",
                hint="collectiverun -np 2 --keras --loops script.py, which cuts the batches "
                "of its steps; or strategy.run(step, args=...) in the script",
            )

    _before_gradients(job, refuse)


def _before_gradients(job: ScriptJob, action: Callable[[], None]) -> None:
    """Call an action before the script takes gradients of what a training changes."""
    stock = tf.GradientTape.gradient

    @functools.wraps(stock)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **more: Any) -> Any:
        trains = any(map(keras_compat.calls.is_trained, tf.nest.flatten(sources)))
        if trains and not job.inside:
            action()
        return stock(self, target, sources, *args, **more)

    job.replace(tf.GradientTape, "gradient", gradient)


def _place() -> str:
    """Return where the script is: file and line."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        # A traced function runs in a file of AutoGraph's; its caller is the script.
        if not is_library(file) and "__autograph_generated" not in file:
            return f"{os.path.basename(file)}:{line}"
    return "an unknown place"


def _sums_itself() -> bool:
    """Return whether the gradients of the script are summed by other means."""
    return tf.distribute.has_strategy() or any(m in sys.modules for m in _DROP_INS)
