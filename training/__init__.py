"""The shared step, the sharded input, and the loop that runs them."""

from training.fit import Result, fit

__all__ = ["Result", "fit"]
