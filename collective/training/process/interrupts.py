"""Ctrl-C in a training: it takes effect between two steps, never within TensorFlow.

If a step were left in its middle, TensorFlow's threads could still compute for it, and would
crash at the end of the process. Ranks must leave between the same two steps, since the script may catch
``KeyboardInterrupt`` and save the model, and every rank takes part in that. So with each
step the ranks tell each other whether one of them has heard it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend, end_process
from collective.elastic import membership_file
from collective.training.process.object_collectives import gather_few

INTERRUPTED = 130  # the exit code
_noticed = _is_kept = False  # whether a rank has heard it; keeps our handler since
_agreement: Agreement | None = None  # of the ranks of the call that runs


def noticed() -> bool:
    """Return whether Ctrl-C was typed since the last training began."""
    return _noticed


def agreed() -> bool:
    """Return whether all ranks leave the call that runs, or ran last, because of Ctrl-C."""
    return _agreement is not None and _agreement.reached


def check() -> None:
    """Raise KeyboardInterrupt where Ctrl-C was typed; called between steps.

    In a call of several ranks, where all of them have agreed on it.
    """
    if _noticed if _agreement is None else _agreement.reached:
        # From now on the script decides when it ends.
        membership_file.write_state(membership_file.INTERRUPTED)
        raise KeyboardInterrupt


class Agreement:
    """What the ranks of a job tell each other about Ctrl-C, with each step.

    Attributes:
        reached: Whether all ranks know that one of them has heard it.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self.reached = False
        self._said: tf.Variable | None = None  # 1 where this rank has heard it

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Surround a call of Keras, which all ranks make."""
        global _agreement
        if _agreement is self and not self.reached:  # in a callback of another call
            yield
            return
        if self.reached:  # and the script has caught it
            membership_file.write_state(membership_file.JOINED)
        self.reached, _agreement = False, self
        if self._said is not None:
            self._said.assign(0.0)
        try:
            with between_steps():
                yield
        finally:
            if not self.reached:
                _agreement = None

    def attached(self) -> list[tf.Tensor]:
        """Return what a step adds up over the ranks, while it is traced."""
        if self._said is None:
            with tf.init_scope(), tf.device("CPU"):
                self._said = tf.Variable(0.0, trainable=False)
        return [self._said.read_value()]

    def say(self) -> None:
        """Say with the next step whether this rank has heard it."""
        if _noticed and self._said is not None:
            self._said.assign(1.0)

    def heard(self, sums: Sequence[Any]) -> bool:
        """Return whether a rank has said so.

        Args:
            sums: The sums of what was attached to a step; this class' own is the last.
        """
        return bool(sums) and float(sums[-1]) > 0

    def ask(self, unit: Callable[[Callable[[], Any]], Any]) -> None:
        """Ask all ranks whether one has heard it, if no step has told them.

        Args:
            unit: Runs what all ranks do together, again where one of them has died.
        """
        mine = [float(_noticed)]
        self.reached |= bool(unit(lambda: gather_few(self._backend, mine).any()))


@contextlib.contextmanager
def between_steps() -> Iterator[None]:
    """Have Ctrl-C wait for ``check``; a second one ends the process at once.

    Nothing changes if the script handles Ctrl-C itself, or if a thread other than the main
    one trains.
    """
    global _noticed, _is_kept
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    is_free = handler == signal.default_int_handler or (handler == _notice and _is_kept)
    if not in_main or not is_free:
        yield
        return
    _noticed = _is_kept = False
    signal.signal(signal.SIGINT, _notice)
    try:
        yield
        check()
    finally:
        # It may still come to this rank, where another one has heard it.
        _is_kept = agreed()
        if not _is_kept:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _notice(number: int, frame: FrameType | None) -> None:
    global _noticed
    if _noticed:
        end_process(INTERRUPTED)
    _noticed = True
