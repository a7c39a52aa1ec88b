"""Trains Keras models on many workers, and moves bytes between them.

>>> import collective
>>> collective.init()
>>> mean = collective.allreduce(np.arange(4.0) * collective.rank())
>>> history = collective.fit(model, x, y, epochs=3)

Importing this package is cheap: each name below is imported when it is first used.
``init()`` loads the native library; only ``fit`` and what trains imports TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collective import backends as backends
    from collective import training as training
    from collective.errors import CollectiveError as CollectiveError
    from collective.errors import UsageError as UsageError
    from collective.library import Disagreement as Disagreement
    from collective.library import PeerLost as PeerLost
    from collective.library import Timeout as Timeout
    from collective.operations.allgather import allgather as allgather
    from collective.operations.allgather import allgather_async as allgather_async
    from collective.operations.allreduce import allreduce as allreduce
    from collective.operations.allreduce import allreduce_async as allreduce_async
    from collective.operations.allreduce import grouped_allreduce as grouped_allreduce
    from collective.operations.allreduce import (
        grouped_allreduce_async as grouped_allreduce_async,
    )
    from collective.operations.alltoall import alltoall as alltoall
    from collective.operations.alltoall import alltoall_async as alltoall_async
    from collective.operations.barrier import barrier as barrier
    from collective.operations.barrier import barrier_async as barrier_async
    from collective.operations.broadcast import broadcast as broadcast
    from collective.operations.broadcast import broadcast_async as broadcast_async
    from collective.operations.join import join as join
    from collective.operations.kinds import Average as Average
    from collective.operations.kinds import Max as Max
    from collective.operations.kinds import Min as Min
    from collective.operations.kinds import Product as Product
    from collective.operations.kinds import Sum as Sum
    from collective.operations.reducescatter import reducescatter as reducescatter
    from collective.operations.reducescatter import (
        reducescatter_async as reducescatter_async,
    )
    from collective.process_set import ProcessSet as ProcessSet
    from collective.run_function import run as run
    from collective.session import cross_rank as cross_rank
    from collective.session import cross_size as cross_size
    from collective.session import init as init
    from collective.session import is_initialized as is_initialized
    from collective.session import local_rank as local_rank
    from collective.session import local_size as local_size
    from collective.session import rank as rank
    from collective.session import shutdown as shutdown
    from collective.session import size as size
    from collective.training.checkpoint.schedule import Checkpoint as Checkpoint
    from collective.training.evaluation.evaluate import evaluate as evaluate
    from collective.training.evaluation.predict import predict as predict
    from collective.training.fit import fit as fit
    from collective.training.sweep.runner import fit_many as fit_many
    from collective.training.unedited.distribute import (
        distribute_keras as distribute_keras,
    )

# The names that each module defines.
_HOMES = {
    "errors": "CollectiveError UsageError",
    "library": "Disagreement PeerLost Timeout",
    "operations.allgather": "allgather allgather_async",
    "operations.allreduce": "allreduce allreduce_async "
    "grouped_allreduce grouped_allreduce_async",
    "operations.alltoall": "alltoall alltoall_async",
    "operations.barrier": "barrier barrier_async",
    "operations.broadcast": "broadcast broadcast_async",
    "operations.join": "join",
    "operations.kinds": "Average Max Min Product Sum",
    "operations.reducescatter": "reducescatter reducescatter_async",
    "process_set": "ProcessSet",
    "run_function": "run",
    "session": "cross_rank cross_size init is_initialized local_rank local_size rank "
    "shutdown size",
    "training.checkpoint.schedule": "Checkpoint",
    "training.evaluation.evaluate": "evaluate",
    "training.evaluation.predict": "predict",
    "training.fit": "fit",
    "training.sweep.runner": "fit_many",
    "training.unedited.distribute": "distribute_keras",
}
_MODULES = ("backends", "training")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_HOME_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"collective.{name}")
    if name == "__version__":
        from collective.launch import versions

        return versions.installed().get("collective", "0+unknown")  # a bare checkout
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'collective' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"collective.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
