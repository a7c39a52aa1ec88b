"""For scripts that import ``horovod.keras``: ``collective.tensorflow.keras``.

The arguments of four names stand in another order in Horovod's two modules, and so they
do here.
"""

# isort: off
from collective.tensorflow.keras import *  # noqa: F403
from collective.keras import callbacks as callbacks  # type: ignore[no-redef]
from collective.keras.signatures import (  # type: ignore[assignment]
    DistributedOptimizer as DistributedOptimizer,
)
from collective.keras.signatures import allreduce as allreduce  # type: ignore[assignment]
