"""For scripts that import ``horovod.keras``: the same as ``collective.tensorflow.keras``."""

from collective.tensorflow.keras import *  # noqa: F403
