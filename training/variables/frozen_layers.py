"""Callbacks that set ``layer.trainable`` in the middle of a training."""

from __future__ import annotations

from weakref import WeakSet

import keras

from collective.log import log
from collective.training.prepared import get_prepared

_warned: WeakSet[keras.Model] = WeakSet()


def check(model: keras.Model, hook: str) -> None:
    """Says what has become of ``layer.trainable`` that a hook has set, on rank 0.

    The step trains the variables that were trainable when it was made. Keras makes its
    train function in the first step and keeps it, so a later change has no effect there
    either. One before the first step is refused (``RankZeroCallbacks``).
    """
    prepared = get_prepared(model)
    before = {id(v): v.path for v in prepared.trainable}
    now = {id(v): v.path for v in model.trainable_variables}
    changed = [
        path for key, path in (before | now).items() if (key in before) != (key in now)
    ]
    if not changed:
        return
    what = f"a callback's {hook} has made {changed[0]!r} " + (
        "trainable" if changed[0] in now.values() else "not trainable"
    )
    hint = "set layer.trainable, compile the model, and call fit again"
    if hook != "on_train_begin" and model not in _warned:
        _warned.add(model)
        log.warning("%s; as in Keras, that changes nothing in this fit: %s", what, hint)
