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
from collective.training.model.variables import optimizer_variables, optimizers_of
from collective.training.partition.mesh.layouts import Layouts, Mesh
from collective.training.sharding.finding import find_required
from collective.training.sharding.held import is_held
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
    placing = of_options(backend, shard_weights=shard_weights)
    if not cuts_weights:
        with placing.making():
            return make()
    with placing.waiting():
        model = make()
    if isinstance(model, keras.Model) and model.built:
        layouts = find_required(model, placing)
        placing.settle([*model.variables, *optimizer_variables(model)], layouts)
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
    placing = of_options(backend, shard_optimizer, shard_weights)
    cuts_weights = options["--tensor-parallel"] or shard_weights
    is_cut = cuts_weights and not any(map(is_held, model.variables))
    searches = is_cut and options["--tensor-parallel"]
    if is_cut:
        _check_not_built(model)
    if is_cut and (model.built or not searches):
        layouts = find_required(model, placing) if searches else Layouts()
        placing.cut(model.variables, layouts)
    if placing.cut_slots(optimizer_variables(model)) or is_cut:
        keras_compat.batch_functions.forget(model)  # which were traced with whole ones
    # A model that is not built is cut when the data have built it: see ``ModelAxis``.
    waits = searches and not model.built
    with placing.waiting() if waits else placing.making():
        yield placing


def of_options(
    backend: Backend,
    shard_optimizer: bool = False,
    shard_weights: bool = False,
    by_map: bool = False,
) -> Placing:
    """Return what lays variables out as the options of a training say.

    Args:
        by_map: Whether the layout map of the current distribution counts, too.
    """
    parts = backend.options.tensor_parallel
    mesh = Mesh({ROWS: backend.size // parts, MODEL: parts}, ROWS)
    return Placing(backend, shard_weights, shard_optimizer, by_map, mesh=mesh)


def _check_not_built(model: keras.Model) -> None:
    """Refuse optimizers that were built for whole weights, and would not know cut ones."""
    if any(optimizer.built for optimizer in optimizers_of(model)):
        raise UsageError(
            "the optimizer has been built already, for whole weights",
            hint="compile the model with a new optimizer before collective.fit; or give "
            "collective.fit a function that makes the model",
        )
