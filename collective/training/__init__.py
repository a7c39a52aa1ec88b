"""The partitioned step, the input of each rank, and the loop that runs them.

Begin with ``calls.fit``, the recipe of a training; then ``steps.partitioned_step``, one
update, and ``partition``, which makes it. ``loop`` has the order of things in a training, and
``loop.observer`` says how everything else is attached to it.
"""

import collective.keras_backend  # noqa: F401  isort: skip
from collective.training.calls.evaluate import evaluate
from collective.training.calls.fit import fit
from collective.training.calls.predict import predict
from collective.training.loop.result import Result
from collective.training.observers.checkpoint.schedule import Checkpoint

__all__ = ["Checkpoint", "Result", "evaluate", "fit", "predict"]
