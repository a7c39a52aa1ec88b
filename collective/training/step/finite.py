"""Loss and gradients that are not finite: found before anything is applied.

Each replica finds its own first variable with a gradient that is not finite. The numbers
travel in the step's all-reduce, so every rank raises the same error in the same step,
and no rank has applied the update; or rank 0 warns, and the update is applied, as in Keras.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError
from collective.log import log

NOT_FINITE = "collective: not finite at step"
OVERFLOW = "collective: overflow in transport at step"


class Watch:
    """What one training does about a value that is not finite.

    Args:
        raises: Whether it ends the training.
        expected: Whether a callback of the user's looks for it, so that no warning is
            needed.

    Attributes:
        paths: Returns the paths of the variables, in the order of their numbers.
    """

    def __init__(self, backend: Backend, raises: bool, expected: bool):
        self.backend, self.raises, self.expected = backend, raises, expected
        self.paths: Callable[[], Sequence[str]] = list
        self._said = backend.rank != 0

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Have steps that are traced inside belong to this training."""
        _watches.append(self)
        try:
            yield
        finally:
            _watches.pop()

    def warn(self, not_finite: tf.Tensor, number: tf.Tensor) -> None:
        """Warn, within a step, if a replica has located a value that is not finite."""
        tf.cond(
            tf.reduce_all(not_finite == 0),
            lambda: False,
            lambda: tf.numpy_function(
                _say, [number, tf.cast(not_finite, tf.int32)], tf.bool
            ),
        )

    def say(self, number: int, places: Sequence[int]) -> None:
        """Warn, the first time only."""
        if not self._said:
            self._said = True
            log.warning(
                "%s. The step is applied, as in Keras; terminate_on_nan=True ends the "
                "training before it",
                _found(str(number), places, self.backend, self.paths()),
            )


_watches: list[Watch] = []


def _say(number: np.ndarray, places: np.ndarray) -> np.bool_:
    """Report to the current training, which may run the graph of an earlier one."""
    if _watches:
        _watches[-1].say(int(number), places.tolist())
    return np.bool_(True)


def first(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the place of the first tensor that is not finite, from 1; 0 for none."""
    if not tensors:  # a train_step that applies nothing
        return tf.zeros([], tf.float32)
    sums = [tf.reduce_sum(t) for t in tensors]
    flags = tf.stack([tf.logical_not(tf.math.is_finite(s)) for s in sums])
    place = tf.where(tf.reduce_any(flags), tf.argmax(flags) + 1, 0)
    return tf.cast(place, tf.float32)


def at_replica(place: tf.Tensor, backend: Backend) -> tf.Tensor:
    """Return ``[most_replicas]`` numbers, zero except this replica's; called in ``run``."""
    return tf.one_hot(backend.replica(), backend.most_replicas) * place


def check(
    not_finite: tf.Tensor, number: tf.Tensor, backend: Backend
) -> list[tf.Operation]:
    """Fail on every replica if any has located a value that is not finite.

    Args:
        not_finite: The sum of ``at_replica`` over replicas; or a place for each rank, if
            several hold a replica together.
        number: The number of the step, for the message.

    Returns:
        The operations to wait for.
    """
    watch = _watches[-1] if _watches else None
    if watch is not None and not watch.raises:
        if not watch.expected:
            watch.warn(not_finite, number)
        return []
    fine = tf.debugging.Assert(
        tf.reduce_all(not_finite == 0),
        [NOT_FINITE, number, tf.cast(not_finite, tf.int32)],
        summarize=max(backend.most_replicas, backend.size),
    )
    return [] if fine is None else [fine]


def check_now(place: int, number: int, backend: Backend, paths: Sequence[str]) -> None:
    """Do what ``check`` does in a step that runs eagerly; every rank has the same values.

    Raises:
        CollectiveError: A value is not finite, and that ends the training.
    """
    watch = _watches[-1] if _watches else None
    if place and (watch is None or watch.raises):
        raise _error(str(number), [place], backend, paths)
    if place and watch is not None and not watch.expected:
        watch.say(number, [place])


def check_transport(
    gradients: Sequence[Sequence[tf.Tensor]],
    connected: Sequence[int],
    not_finite: tf.Tensor,
    number: tf.Tensor,
) -> list[tf.Operation]:
    """Do what ``check`` does for a sum that is not finite although all its parts are.

    If gradients travel in float16, a sum of 65,520 or more is infinite.
    """
    if _watches and _watches[-1].expected:
        return []
    bad = [
        tf.logical_not(
            tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in one])
        )
        for one in zip(*gradients, strict=True)
    ]
    if not bad:
        return []
    flags = tf.stack(bad)
    found = tf.reduce_any(flags) & tf.reduce_all(not_finite == 0)
    fine = tf.debugging.Assert(
        tf.logical_not(found),
        [OVERFLOW, number, tf.gather(connected, tf.argmax(flags))[None]],
    )
    return [] if fine is None else [fine]


def explain(error: Exception, backend: Backend, paths: Sequence[str]) -> Exception:
    """Return the error to raise for an error of a step.

    An asynchronous backend raises it in a later step, so its message has the number.

    Args:
        paths: The paths of the variables, in the order of their numbers.

    Returns:
        A ``CollectiveError`` that names step, rank and variable if a check failed; else
        the error itself.
    """
    message = str(error)
    numbers = r"\]?\s*\[(\d+)\]\s*\[([\d ]+)\]"
    found = re.search(re.escape(OVERFLOW) + numbers, message)
    if found:
        path = paths[int(found.group(2))]
        return CollectiveError(
            f"step {found.group(1)}: gradients travel in {backend.rounds_to}, and the sum "
            f"of those of {path!r} is too large for it, though each rank's own is finite. "
            "No rank applied the step.",
            hint="--transport-dtype bfloat16, which reaches as far as float32; or none",
        )
    if NOT_FINITE not in message:
        return error
    found = re.search(re.escape(NOT_FINITE) + numbers, message)
    step = found.group(1) if found else "unknown"
    places = [int(p) for p in found.group(2).split()] if found else [1]
    return _error(step, places, backend, paths)


def _error(
    step: str, places: Sequence[int], backend: Backend, paths: Sequence[str]
) -> CollectiveError:
    return CollectiveError(
        f"{_found(step, places, backend, paths)}. No rank applied the step.",
        hint="lower --learning-rate, clip with --global-clipnorm 1, or look for "
        "NaN in that rank's data",
    )


def _found(
    step: str, places: Sequence[int], backend: Backend, paths: Sequence[str]
) -> str:
    """Say which value is not finite, in which step, and on which rank."""
    replica = next((r for r, place in enumerate(places) if place), 0)
    where = "rank" if backend.size > 1 else "replica"
    index = places[replica] - 1
    what, which = "the loss, its gradient or what a metric adds up", ""
    if index < len(paths) and paths[index]:
        what = "the loss or its gradient"
        which = f"; the first gradient that is not finite is that of {paths[index]!r}"
    return f"step {step}: {what} is not finite on {where} {replica}{which}"
