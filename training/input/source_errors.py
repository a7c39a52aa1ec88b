"""What a source had to say when it failed within TensorFlow.

Rows are read by threads of ``tf.data``. An error raised there reaches the training
loop as a ``tf.errors.OpError``, its text buried in one of many lines: here it is dug
out.
"""

from __future__ import annotations

import re

import tensorflow as tf

from collective.errors import UsageError

_TOLD = re.compile(r"UsageError: (.*)\nHINT: (.*)")
# What assert_cardinality says, where a data set has more or fewer rows than it says.
_ENDED = re.compile(r"expected to contain \d+ elements but contained .*\d+ elements")


def explain(error: tf.errors.OpError) -> UsageError | None:
    """The ``UsageError`` that made TensorFlow raise; None if it was nothing known.

    It is one rank's: others may have read their rows well.
    """
    told = _TOLD.search(error.message)
    if told is not None:
        return UsageError(told[1], hint=told[2], everywhere=False)
    ended = _ENDED.search(error.message)
    if ended is None:
        return None
    return UsageError(
        f"the data are not as long as they said: {ended[0]}",
        hint="give assert_cardinality the number of rows that there are, on every rank",
        everywhere=False,
    )
