"""Errors of sources, found in those that TensorFlow raises.

Threads of ``tf.data`` read the rows. An error raised there reaches the training loop as a
``tf.errors.OpError`` with the original message in one of many lines.
"""

from __future__ import annotations

import re

import tensorflow as tf

from collective.errors import UsageError

_USAGE_ERROR = re.compile(r"UsageError: (.*)\nHINT: (.*)")
# The message of assert_cardinality for a data set with more or fewer rows.
_WRONG_LENGTH = re.compile(
    r"expected to contain \d+ elements but contained .*\d+ elements"
)


def explain(error: tf.errors.OpError) -> UsageError | None:
    """The ``UsageError`` behind an error of TensorFlow; None if there is none.

    It is the error of this rank: other ranks may have read their rows.
    """
    found = _USAGE_ERROR.search(error.message)
    if found is not None:
        return UsageError(found[1], hint=found[2], everywhere=False)
    wrong_length = _WRONG_LENGTH.search(error.message)
    if wrong_length is None:
        return None
    return UsageError(
        f"the data set has not as many rows as declared: {wrong_length[0]}",
        hint="give assert_cardinality the actual number of rows, on every rank",
        everywhere=False,
    )
