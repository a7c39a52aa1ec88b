"""The shared step, the sharded input, and the loop that runs them.

Begin with ``fit``, the recipe of a training; then ``loop``, the order of things in it,
and ``step``, one update. ``observer`` says how everything else is attached to the loop.
"""

import collective.keras_backend  # noqa: F401  isort: skip
from collective.training.evaluation.evaluate import evaluate
from collective.training.evaluation.predict import predict
from collective.training.fit import fit
from collective.training.loop.result import Result
from collective.training.observers.checkpoint.schedule import Checkpoint

__all__ = ["Checkpoint", "Result", "evaluate", "fit", "predict"]
