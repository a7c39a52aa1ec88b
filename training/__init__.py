"""The shared step, the sharded input, and the loop that runs them."""

from collective.training.checkpoint.schedule import Checkpoint
from collective.training.fit import fit
from collective.training.loop import Result
from collective.training.sweep.runner import Trained, fit_many

__all__ = ["Checkpoint", "Result", "Trained", "fit", "fit_many"]
