"""The shared step, the sharded input, and the loop that runs them."""

from training.checkpoint import Checkpoint
from training.fit import fit
from training.loop import Result
from training.many import Trained, fit_many

__all__ = ["Checkpoint", "Result", "Trained", "fit", "fit_many"]
