"""Trains Keras models on many workers, and moves bytes between them.

>>> import collective
>>> collective.init()
>>> mean = collective.allreduce(np.arange(4.0) * collective.rank())
>>> history = collective.fit(model, x, y, epochs=3)

Importing this package is cheap: each name below is imported when it is first used.
``init()`` loads the native library; only ``fit`` and other functions that train import
TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from collective.namesake import warn_of_namesake

if TYPE_CHECKING:  # the names below, for type checkers, editors and the reference
    from collective import backends, distribute, training
    from collective.distribute.unedited import distribute_keras
    from collective.errors import CollectiveError, UsageError
    from collective.library import Disagreement, PeerLost, Timeout
    from collective.operations.allgather import allgather, allgather_async
    from collective.operations.allreduce import (
        allreduce,
        allreduce_async,
        grouped_allreduce,
        grouped_allreduce_async,
    )
    from collective.operations.alltoall import alltoall, alltoall_async
    from collective.operations.barrier import barrier, barrier_async
    from collective.operations.broadcast import broadcast, broadcast_async
    from collective.operations.join import join
    from collective.operations.kinds import Average, Max, Min, Product, Sum
    from collective.operations.reducescatter import reducescatter, reducescatter_async
    from collective.process_set import ProcessSet
    from collective.run_function import run
    from collective.session import (
        cross_rank,
        cross_size,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )
    from collective.training.calls.evaluate import evaluate
    from collective.training.calls.fit import fit
    from collective.training.calls.predict import predict
    from collective.training.observers.checkpoint.schedule import Checkpoint

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
    "training.observers.checkpoint.schedule": "Checkpoint",
    "training.calls.evaluate": "evaluate",
    "training.calls.predict": "predict",
    "training.calls.fit": "fit",
    "distribute.unedited": "distribute_keras",
}
_MODULES = ("backends", "distribute", "training")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Literal, so that type checkers know the public names.
# fmt: off
__all__ = [
    "Average", "Checkpoint", "CollectiveError", "Disagreement", "Max", "Min",
    "PeerLost", "ProcessSet", "Product", "Sum", "Timeout", "UsageError", "allgather",
    "allgather_async", "allreduce", "allreduce_async", "alltoall", "alltoall_async",
    "backends", "barrier", "barrier_async", "broadcast", "broadcast_async",
    "cross_rank", "cross_size", "distribute", "distribute_keras", "evaluate", "fit",
    "grouped_allreduce", "grouped_allreduce_async", "init", "is_initialized", "join",
    "local_rank", "local_size", "predict", "rank", "reducescatter",
    "reducescatter_async", "run", "shutdown", "size", "training",
]
# fmt: on


warn_of_namesake()


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
