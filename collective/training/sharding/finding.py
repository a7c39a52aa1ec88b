"""Layouts along the model axis that rank 0 finds for a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras

from collective.errors import UsageError, first_line
from collective.training import keras_compat
from collective.training.partition.mesh import suggestion
from collective.training.partition.mesh.layouts import Layouts, resolve
from collective.training.process.object_collectives import broadcast_object
from collective.training.sharding.held import part_of, tracing
from collective.training.sharding.placing import Placing


def find(
    model: keras.Model, placing: Placing, x: Any = None
) -> tuple[Layouts | None, str]:
    """Find the cheapest layouts for batches of one row; every rank calls it.

    So a weight is cut if that costs little beside its size, however many rows travel. Rank 0
    finds them, for it takes seconds.

    Args:
        model: Built.
        x: Inputs of a batch, for a model without symbolic ones. A model that cannot be
            called with them has layouts of the models in it.

    Returns:
        The layouts, or None and the reason why there are none.
    """
    backend, mesh = placing.backend, placing.mesh
    found: dict[str, suggestion.Axes] = {}
    why = ""
    if backend.rank == 0:
        with tracing(runs=False):
            found, why = _suggested(model, placing, x)
    found, why = broadcast_object(backend, (found, why))
    if found:
        return resolve(model, suggestion.Exact(found), mesh), ""
    ranks = math.prod(mesh.sizes[axis] for axis in mesh.model_axes)
    return None, why or (
        f"no weight of model {model.name!r} is worth being cut over {ranks} ranks "
        "(--tensor-parallel)"
    )


def find_required(model: keras.Model, placing: Placing, x: Any = None) -> Layouts:
    """Return the layouts that ``find`` finds.

    Raises:
        UsageError: There are none.
    """
    layouts, why = find(model, placing, x)
    if layouts is None:
        raise UsageError(
            why,
            hint="drop --tensor-parallel; or a layout map of your own: "
            "keras.distribution.ModelParallel in a script that collectiverun --keras starts",
        )
    return layouts


def _suggested(
    model: keras.Model, placing: Placing, x: Any
) -> tuple[dict[str, suggestion.Axes], str]:
    """Return layouts, and why there are none; code of the model may raise anything."""
    found: dict[str, suggestion.Axes] = {}
    whys = []
    for part, inputs in ((model, x), *((one, None) for one in _models_in(model))):
        given = inputs if _needs_inputs(part) else None
        settled = _axes_of_held(part) | found
        try:
            found |= suggestion.suggest(
                part, placing.mesh, x=given, rows=1, settled=settled
            )
        except UsageError as error:
            whys.append(error.message)
            continue
        except Exception as error:  # of the model's code
            whys.append(first_line(error))
            continue
        if part is model:
            break  # the models in it are parts of its graph
    return found, (whys or [""])[0]


def _axes_of_held(model: keras.Model) -> dict[str, suggestion.Axes]:
    """Return the layouts of variables that another model has, too."""
    held = [part for part in map(part_of, model.variables) if part is not None]
    return {one.path: one.layout.names(len(one.shape)) for one in held}


def _needs_inputs(model: keras.Model) -> bool:
    """Return whether a model does not say itself what it is called with."""
    known = keras_compat.model.symbolic_inputs(model)
    return known is None and keras_compat.model.built_shapes(model) is None


def _models_in(model: keras.Model) -> Iterator[keras.Model]:
    """Yield the built models that a model holds, each before those that it holds itself."""
    for layer in keras_compat.model.layers_of(model)[1:]:
        if isinstance(layer, keras.Model) and layer.built:
            yield layer
