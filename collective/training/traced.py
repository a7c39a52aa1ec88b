"""``tf.function`` for functions of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """A ``tf.function`` without AutoGraph and without TensorFlow's advice on retracing.

    Each training traces these functions again, as Keras does with its own. After the fifth
    in a process TensorFlow would advise the user to change functions that are not theirs.
    """
    made = tf.function(function, autograph=False, **options)
    made._omit_frequent_tracing_warning = True  # no argument sets it
    return made
