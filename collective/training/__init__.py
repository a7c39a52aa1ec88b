"""The step on one batch, shared out over the replicas, in Keras' own loops.

Begin with ``calls.fit``; then ``steps``, the function of a batch that Keras' loops call, and
``partition``, which makes its graph for the rows of a process. ``loop`` observes Keras' loop,
and ``loop.observer`` says how everything else is attached to it.
"""

import collective.keras_backend  # noqa: F401  isort: skip
from collective.training.calls.evaluate import evaluate
from collective.training.calls.fit import fit
from collective.training.calls.predict import predict
from collective.training.loop.result import Result
from collective.training.observers.checkpoint.schedule import Checkpoint

__all__ = ["Checkpoint", "Result", "evaluate", "fit", "predict"]
