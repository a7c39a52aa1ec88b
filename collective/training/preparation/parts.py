"""Models of which each rank holds a part, by options of a training.

``tensor_parallel=T`` of a backend makes a mesh of N / T by T ranks. Weights are cut along its
second axis, "model", as ``collective.layouts.suggest`` finds it for the model, and so are the
slots of its optimizer. ``shard_optimizer`` keeps slots in pieces along the first axis, "batch"
(ZeRO stage 1), and ``shard_weights`` keeps weights so, too (stage 3). A slot is any variable of an optimizer but scalars: Adam's ``m`` and ``v``,
averages of the weights, sums of gradients. It is cut as soon as it is made, so that no rank
ever has all of them whole.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, 2020; Y. Xu et al., Automatic Cross-Replica Sharding of Weight Update in
Data-Parallel Training, 2020 (arXiv:2004.13336).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras

from collective.backends import Options
from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.model.variables import optimizers_of
from collective.training.partition.mesh import suggestion
from collective.training.partition.mesh.layouts import Layouts, Mesh, resolve
from collective.training.process.object_collectives import broadcast_object
from collective.training.sharding.held import is_held, tracing
from collective.training.sharding.placing import ROWS, Placing

MODEL = "model"  # the axis along which weights are cut


def check(backend: Backend, what: str) -> None:
    """Refuse options for a sum that is not made.

    Args:
        what: The option by which none is made.
    """
    for option in ("algorithm", "transport_dtype", "bucket_bytes"):
        if getattr(backend.options, option) != getattr(Options(), option):
            raise UsageError(
                f"--{option.replace('_', '-')} is for the all-reduce of gradients, and "
                f"{what} has none",
                hint="drop one of the two",
            )


def made(
    make: Callable[[], keras.Model], backend: Backend, shard_weights: bool
) -> keras.Model:
    """Return the model that a function makes, cut as the options say.

    Its weights get their values one by one, when it is known how they are cut, so that no
    rank ever has the whole model in memory. Every rank calls it.

    Raises:
        UsageError: No weight of the model is worth being cut.
    """
    cuts_weights = backend.options.tensor_parallel > 1
    if backend.size == 1 or not (shard_weights or cuts_weights):
        return make()
    placing = _placing(backend, shard_weights=shard_weights)
    if not cuts_weights:
        with placing.making():
            return make()
    with placing.waiting() as waiting:
        model = make()
    is_cut = isinstance(model, keras.Model) and model.built
    placing.settle(waiting, _layouts(model, placing) if is_cut else Layouts())
    return model


@contextlib.contextmanager
def in_parts(
    model: keras.Model, backend: Backend, shard_optimizer: bool, shard_weights: bool
) -> Iterator[Placing | None]:
    """Cut a compiled model and its optimizers, and inside the slots that are made.

    A model that is made before has been whole on each rank for a moment: it is cut in
    place. Every rank enters it.

    Yields:
        What lays variables out; None if all are whole.

    Raises:
        UsageError: The model, or options of the backend, do not work with it.
    """
    options = {
        "--tensor-parallel": backend.options.tensor_parallel > 1,
        "--shard-weights": shard_weights,
        "--shard-optimizer": shard_optimizer,
    }
    asked = [option for option, is_on in options.items() if is_on]
    if shard_optimizer or shard_weights:
        check(backend, asked[-1])
    if backend.size == 1 or not asked:
        yield None
        return
    if model.run_eagerly:
        raise UsageError(
            f"model {model.name!r} has run_eagerly=True, and variables in parts need a "
            "graph of the step",
            hint=f"compile it without run_eagerly; or drop {asked[0]}",
        )
    if shard_weights and hasattr(backend, "strategy"):
        raise UsageError(
            f"--shard-weights cuts weights, and backend {backend.name!r} has no groups of ranks",
            hint="backend native or mpi",
        )
    placing = _placing(backend, shard_optimizer, shard_weights)
    slots = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    cuts_weights = options["--tensor-parallel"] or shard_weights
    is_cut = cuts_weights and not any(map(is_held, model.variables))
    if is_cut:
        layouts = Layouts()
        _check_not_built(model)
        if options["--tensor-parallel"]:
            layouts = _layouts(model, placing)
        placing.settle(model.variables, layouts)
    if placing.cut_slots(slots) or is_cut:
        keras_compat.batch_functions.forget(model)  # which were traced with whole ones
    with placing.making():
        yield placing


def _placing(
    backend: Backend, shard_optimizer: bool = False, shard_weights: bool = False
) -> Placing:
    parts = backend.options.tensor_parallel
    mesh = Mesh({ROWS: backend.size // parts, MODEL: parts}, ROWS)
    return Placing(backend, shard_weights, shard_optimizer, by_map=False, mesh=mesh)


def _check_not_built(model: keras.Model) -> None:
    """Refuse optimizers that were built for whole weights, and would not know cut ones."""
    if any(optimizer.built for optimizer in optimizers_of(model)):
        raise UsageError(
            "the optimizer has been built already, for whole weights",
            hint="compile the model with a new optimizer before collective.fit; or give "
            "collective.fit a function that makes the model",
        )


def _layouts(model: keras.Model, placing: Placing) -> Layouts:
    """Return layouts along the model axis; every rank calls it.

    They are the cheapest ones for batches of one row: a weight is cut if that costs little
    beside its size, however many rows travel. Rank 0 finds them, for it takes seconds.
    """
    backend, mesh = placing.backend, placing.mesh
    if not model.built:
        raise UsageError(
            f"model {model.name!r} has no weights yet that --tensor-parallel could cut",
            hint="begin it with keras.Input, or call model.build(shape) before "
            "collective.fit",
        )
    found: dict[str, suggestion.Axes] = {}
    error: UsageError | None = None
    if backend.rank == 0:
        try:
            with tracing():
                found = suggestion.suggest(model, mesh, rows=1)
        except UsageError as raised:
            error = raised
    found, message = broadcast_object(backend, (found, error and error.message))
    if not found:
        raise UsageError(
            message
            or f"no weight of model {model.name!r} is worth being cut over "
            f"{mesh.sizes[MODEL]} ranks (--tensor-parallel)",
            hint="drop --tensor-parallel; or a layout map of your own: "
            "keras.distribution.ModelParallel in a script that collectiverun --keras starts",
        )
    return resolve(model, suggestion.Exact(found), mesh)
