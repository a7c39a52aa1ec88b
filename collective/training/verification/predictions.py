"""Whether a model predicts a row alike, whatever rows come with it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.exchange import broadcast_object
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.verification.differences import Pair, differing, tolerance
from collective.training.verification.first_rows import (
    compared_rows,
    count,
    fewer,
    first_batches,
    uneven,
)
from collective.training.verification.pieces import (
    packed,
    predict_in_pieces,
    undo_writes,
)
from collective.training.verification.settings import exact_products

_PIECES = 3
_found: WeakKeyDictionary[keras.Model, dict[str, bool]] = WeakKeyDictionary()


def couples_rows(
    model: keras.Model, backend: Backend, inputs: Input | Batches, wanted: bool = True
) -> bool:
    """Whether predictions depend on the rows beside them; every rank calls it.

    Rank 0 predicts a few rows at once and in pieces, with the other ranks where several
    hold a replica together. Once for each model and kind of data; what fails here fails
    in the prediction, which says why.

    Args:
        wanted: Whether to look; that of rank 0 counts.
    """
    of_model = _found.setdefault(model, {})
    key = repr(inputs.spec)
    if key not in of_model:
        batches = first_batches(inputs)
        takes_part = backend.rank == 0 or backend.tensor is not None
        mine = wanted and takes_part and bool(batches)
        mine = mine and _differs(model, batches[0])
        of_model[key] = bool(broadcast_object(backend, mine))
    return of_model[key]


def _differs(model: keras.Model, rows: Any) -> bool:
    rows = fewer(rows, compared_rows(model, rows))
    try:
        with (
            exact_products(),
            undo_writes(),
            keras_compat.fixed_randomness(),
            keras_compat.moving_statistics(False),
        ):
            whole = tf.nest.flatten(model.predict_step(packed(rows)))
            pieces = predict_in_pieces(model, rows, uneven(count(rows), _PIECES))
            if pieces is None:
                return False
            pairs = [
                Pair("log", "", *map(_dense, pair))
                for pair in zip(whole, pieces, strict=True)
            ]
            return next(differing(pairs, tolerance(model)), None) is not None
    except Exception:
        return False


def _dense(value: Any) -> Any:
    """Ragged predictions by their values."""
    return value.flat_values if isinstance(value, tf.RaggedTensor) else value
