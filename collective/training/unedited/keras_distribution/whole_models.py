"""What reads or writes the weights of a split model sees them whole, on every rank.

``model.save`` writes the file that one process would write, ``get_weights`` returns whole
arrays and ``load_weights`` takes them. All ranks must call these. ``summary`` and
``count_params`` read shapes only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from collective.training.keras_compat import entry_points
from collective.training.parallel.tensor_parallel_variables import SplitLayers, parts_of
from collective.training.prepared import get_partition
from collective.training.sharding.whole import ShardedVariables
from collective.training.unedited.script_job import WHOLE, ScriptJob

_METHODS = (
    (keras.layers.Layer, "get_weights"),
    (keras.layers.Layer, "set_weights"),
    (keras.Model, "load_weights"),
)
_OF_SHAPES = (
    (keras.layers.Layer, "count_params"),
    (keras.Model, "count_params"),
    (keras.Model, "summary"),
)


def replace_reading(job: ScriptJob) -> None:
    """Has these calls see whole variables; after all else that replaces them."""
    savers = [saver[:2] for saver in entry_points.savers()]
    for owner, name in [*_METHODS, *savers]:
        _replace(job, owner, name, _of_values)
    for owner, name in _OF_SHAPES:
        if name in vars(owner):
            _replace(job, owner, name, _of_shapes)


def _replace(job: ScriptJob, owner: Any, name: str, make: Callable[..., Any]) -> None:
    stock = getattr(owner, name)
    if inspect.isclass(owner):
        job.replace(owner, name, make(job, stock))
        return
    for place in entry_points.places_of(stock):
        job.replace(*place, make(job, stock))


def _of_values(job: ScriptJob, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        variables = _sharded(job, self)
        if variables is None or job.inside or job.whole:
            return stock(self, *args, **kwargs)
        with job.calling(WHOLE):
            values = variables.gather(everywhere=True)
        job.whole = True
        try:
            with variables.whole(lambda: values) as whole:
                result = stock(self, *args, **kwargs)
                written = whole.written()
        finally:
            job.whole = False
        variables.put(written)
        return result

    return method


def _of_shapes(job: ScriptJob, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        variables = _sharded(job, self)
        if variables is None or job.inside or job.whole:
            return stock(self, *args, **kwargs)
        with variables.whole_shapes():
            return stock(self, *args, **kwargs)

    return method


def _sharded(job: ScriptJob, layer: Any) -> ShardedVariables | None:
    """Returns the sharded variables of a model or layer, or None if there are none."""
    if not job.split_layers or not isinstance(layer, keras.layers.Layer):
        return None
    found = get_partition(layer) if isinstance(layer, keras.Model) else None
    if found is not None:
        return found
    parts = parts_of(layer)
    return None if parts is None else SplitLayers(layer, job.grouped[parts])
