"""The shared step, the sharded input, and the loop that runs them."""

from training.checkpoint import Checkpoint
from training.fit import Result, fit

__all__ = ["Checkpoint", "Result", "fit"]
