"""For scripts that import ``horovod.keras``: ``collective.tensorflow.keras``.

The arguments of three names have another order in Horovod's two modules, and therefore
here.
"""

from __future__ import annotations

from typing import Any

from collective.operations.kinds import Average, Sum
from collective.tensorflow.keras import *  # noqa: F403
from collective.tensorflow.keras import interface
from collective.tensorflow.signatures import ordered

# isort: split
# Not the callbacks of collective.tensorflow.keras, which the line above imports.
import collective.keras.callbacks  # noqa: F401

DistributedOptimizer = ordered(
    "optimizer name device_dense device_sparse compression sparse_as_dense "
    "gradient_predivide_factor op num_groups groups "
    # Names that horovod.keras does not have:
    "backward_passes_per_step average_aggregated_gradients process_set "
    "scale_local_gradients",
    module=__name__,
)(interface.DistributedOptimizer)


@ordered(  # type: ignore[no-redef]
    "value name average prescale_factor postscale_factor op compression",
    interface.allreduce,
)
def allreduce(value: Any, average: bool = True, op: Any = None, **options: Any) -> Any:
    """Call ``collective.tensorflow.keras.allreduce``; ``op`` supersedes ``average``."""
    if op is None:
        op = Average if average else Sum
    return interface.allreduce(value, op=op, **options)
