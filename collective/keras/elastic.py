"""The elastic state of ``collective.tensorflow.keras``."""

from collective.tensorflow.keras.elastic import *  # noqa: F403
