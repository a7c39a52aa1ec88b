"""The callbacks of ``collective.tensorflow.keras``."""

from collective.tensorflow.keras.callbacks import *  # noqa: F403
