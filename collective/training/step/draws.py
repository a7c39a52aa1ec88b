"""The random numbers of a forward pass: those that one process would draw.

Without a seed of its own, a training draws from the states of the model's seed generators,
as Keras' step does, and counts them up after each step. With one, each step has numbers
that follow from the seed and the step's number. Either way a piece of a batch draws its
rows of the draw for the global batch (``keras_compat.draw_rows``): any number of replicas
and micro-batches has the masks of one process.

Virtual replicas have masks of their own, which follow from the piece's number, too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.log import log
from collective.training import keras_compat
from collective.training.keras_compat import Place, SeedUse
from collective.training.prepared import PreparedModel

_fold_in = tf.random.experimental.stateless_fold_in


@dataclass
class Drawn:
    """What a pass has drawn; see ``Found``."""

    seeds: SeedUse = field(default_factory=SeedUse)
    others: list[str] = field(default_factory=list)


class Draws:
    """How the passes of a step draw.

    Args:
        seed: Of the training; None: the model's generators are what they are.
        by_piece: Whether each piece has numbers of its own.
    """

    def __init__(
        self, prepared: PreparedModel, seed: int | None = None, by_piece: bool = False
    ):
        self._state = prepared.state
        self._seed = (seed or 0) % 2**31
        self._follows_keras = seed is None and not by_piece
        self._by_piece = by_piece

    def key(self, position: tf.Tensor) -> tf.Tensor:
        """What generators are seeded by, unless they are what they are: int32 ``[2]``.

        Args:
            position: ``(step, replica, micro-batch, ...)``, int64.
        """
        key = tf.constant([self._seed, 0], tf.int32)
        numbers = tf.unstack(tf.cast(position, tf.int32))
        for number in numbers[: 3 if self._by_piece else 1]:
            key = _fold_in(key, number)
        return key

    def seeded(self, state: list[tf.Tensor], key: tf.Tensor) -> list[tf.Tensor]:
        """The model's state, as a pass that draws with this key begins with it."""
        if self._follows_keras:
            return state
        return [
            tf.cast(_fold_in(key, tf.cast(value[0], tf.int32)), value.dtype)
            if keras_compat.is_seed_state(variable)
            else value
            for variable, value in zip(self._state, state, strict=True)
        ]

    def untracked(self, key: tf.Tensor) -> Callable[[int], tf.Tensor] | None:
        """Seeds for generators that the model does not track; None: their own."""
        if self._follows_keras:
            return None
        return lambda call: _fold_in(key, -(2**20) - call)

    @contextlib.contextmanager
    def tracing(self, place: Place | None, key: tf.Tensor) -> Iterator[Drawn]:
        """Around a forward pass over the rows at a place; None: over the whole batch.

        Yields:
            What is known of its draws when it has ended.
        """
        used, drawn = SeedUse(), Drawn()
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_compat.counted_seeds(used))
            if not self._follows_keras:
                seeds = keras_compat.global_seeds(lambda n: _fold_in(key, -1 - n))
                stack.enter_context(seeds)
            if place is not None and not self._by_piece:
                others = stack.enter_context(keras_compat.draw_rows(place))
            else:
                others = []
            yield drawn
        drawn.others += [*others, *used.others]
        if self._follows_keras:
            drawn.seeds = used


def explained(error: Exception) -> Exception:
    """The error to raise for one that a step raised: what a draw of no rows is."""
    if keras_compat.NOT_ROWS not in str(error):
        return error
    found = re.search(
        re.escape(keras_compat.NOT_ROWS) + r"\]?\s*\[([\d ]+)\]", str(error)
    )
    shape = f" of shape [{found[1]}]" if found else ""
    return UsageError(
        f"the model makes a random draw{shape} over a number of entries that is no "
        "multiple of the rows of its part of the batch: which of them another rank has "
        "cannot be known",
        hint="draw for all rows, and choose from the draw; or train it on one rank",
        everywhere=False,
    )


def warn_of_draws(model: keras.Model, others: Sequence[str]) -> None:
    """Names what a model draws otherwise than in one process."""
    for other in dict.fromkeys(others):
        log.warning(
            "model %r has %s: its numbers are not those of one process",
            *(model.name, other),
        )
