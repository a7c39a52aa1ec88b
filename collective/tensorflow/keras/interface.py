"""Functions whose arguments have a different order in ``collective.tensorflow``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from collective.tensorflow import collectives, optimizer
from collective.tensorflow.compression import Compression, Compressor
from collective.tensorflow.keras_optimizer import is_distributed
from collective.tensorflow.signatures import ordered

# Anything that is like a tensor: numbers, lists, arrays.
allgather = ordered("value=tensor name", module=__name__)(collectives.allgather)
allreduce = ordered(
    "value=tensor name average prescale_factor postscale_factor op compression",
    module=__name__,
)(collectives.allreduce)
broadcast = ordered("value=tensor root_rank name", module=__name__)(
    collectives.broadcast
)
reducescatter = ordered("value=tensor name op", module=__name__)(
    collectives.reducescatter
)
DistributedOptimizer = ordered(
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op backward_passes_per_step "
    "average_aggregated_gradients num_groups groups process_set scale_local_gradients",
    module=__name__,
)(optimizer.DistributedOptimizer)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model; its optimizer becomes a ``DistributedOptimizer`` with its state.

    Args:
        filepath: As for ``keras.models.load_model``.
        custom_optimizers: Classes of optimizers that are not part of Keras.
        custom_objects: As for ``keras.models.load_model``.
        compression: How gradients are compressed on the way.
        legacy_opts: Only False is possible.

    Raises:
        NotImplementedError: If ``legacy_opts`` is true.
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
    plain = getattr(model, "optimizer", None)
    if plain is not None and not is_distributed(plain):
        model.optimizer = DistributedOptimizer(plain, compression=compression)
    return model
