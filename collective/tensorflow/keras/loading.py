"""``load_model``: a saved model that continues its training over all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.keras.optimizer import DistributedOptimizer
from collective.tensorflow.keras_optimizer import is_distributed


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a model; its optimizer becomes a ``DistributedOptimizer`` with its state.

    Args:
        filepath: As for ``keras.models.load_model``.
        custom_optimizers: Classes of optimizers that are not Keras' own.
        custom_objects: As for ``keras.models.load_model``.
        compression: What is sent.
        legacy_opts: Only False.

    Raises:
        NotImplementedError: With ``legacy_opts``.
    """
    if legacy_opts:
        raise NotImplementedError(
            "legacy_opts=True: Keras 3 has no keras.optimizers.legacy\n"
            "HINT: leave it out"
        )
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**known, **(custom_objects or {})}
    )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
    return model
