"""A script's ``ModelParallel``: layers split over groups of ranks, by its ``LayoutMap``.

A mesh of D x T devices is D replicas of T neighbouring ranks each. ``Dense`` and
``Embedding`` are split where they are built (``parallel.stock_layers``), as their
layouts say. A layout that would split anything else, or otherwise, is refused there.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from collective.backends.base import Backend
from collective.backends.capabilities import TensorParallel
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.parallel import stock_layers, tensor_parallel_variables
from collective.training.parallel.layers import TensorParallelLayer
from collective.training.unedited.script_job import DISTRIBUTION, ScriptJob

Axes = tuple[str | None, ...]
# By class of the layer: the variable with two axes, and that which is split with the columns.
_VARIABLES = {
    stock_layers.DENSE: ("kernel", "bias"),
    stock_layers.EMBEDDING: ("embeddings", ""),
}


def replace_building(job: ScriptJob) -> None:
    """Has layers that a script builds follow its ``LayoutMap``, until ``job.undo``."""
    for kind in _VARIABLES:
        job.replace(kind, "build", _building(job, kind))
    base = keras.layers.Layer
    job.replace(base, "add_weight", _adding(job, base.add_weight))
    for owner in keras_compat.optimizers.optimizers_with_apply():
        job.replace(owner, "apply", _applying(job, owner.apply))
    for name in ("train_on_batch", "test_on_batch", "predict_on_batch"):
        call = getattr(keras.Model, name)
        job.replace(keras.Model, name, _refusing(job, call, f"Model.{name}"))


def model_axis(distribution: Any) -> tuple[str, int] | None:
    """Returns the mesh axis over which weights are split, and its length, or None.

    Raises:
        UsageError: Several axes would split weights.
    """
    if not isinstance(distribution, keras.distribution.ModelParallel):
        return None
    mesh, rows = distribution.device_mesh, distribution.batch_dim_name
    sizes = zip(mesh.axis_names, mesh.shape, strict=True)
    used = keras_compat.distribution.axes_used(distribution) - {rows}
    found = [(name, size) for name, size in sizes if name in used and size > 1]
    if len(found) > 1:
        raise UsageError(
            f"the script's ModelParallel has a mesh of shape {tuple(mesh.shape)}: weights "
            f"would be split over the axes {[name for name, _ in found]}, and only one "
            "can be longer than 1",
            hint=f"a mesh of two axes: {rows!r} and one for weights",
        )
    return found[0] if found else None


def make_groups(job: ScriptJob, distribution: Any) -> None:
    """Makes the groups of ranks that a distribution needs. Every rank calls it."""
    axis = model_axis(distribution)
    if axis is None or axis[1] in job.grouped:
        return
    backend, (_, parts) = job.backend, axis
    if not isinstance(backend, TensorParallel):
        raise UsageError(
            f"the script's ModelParallel splits weights over {parts} ranks, and backend "
            f"{backend.name!r} cannot split layers",
            hint="collectiverun --keras, which takes backend native; or "
            "keras.distribution.DataParallel() in the script",
        )
    with job.calling(DISTRIBUTION):
        job.grouped[parts] = backend.grouped(parts)


def backend_for(job: ScriptJob, model: keras.Model) -> Backend:
    """The backend that runs a model: its groups, where layers of it are split.

    A model without variables yet gets them as the current distribution says.
    """
    parts = tensor_parallel_variables.parts_of(model)
    if parts is not None:
        return job.grouped[parts]
    axis = model_axis(keras_compat.distribution.current_distribution())
    return job.backend if model.built or axis is None else job.grouped[axis[1]]


def _building(job: ScriptJob, kind: type[Any]) -> Any:
    """Returns a ``build`` for a class of layers that follows their layouts."""
    stock = kind.build

    @functools.wraps(stock)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        split = _split(self, kind)
        if split is None:
            return stock(self, *args, **kwargs)
        axis, parts = split
        make_groups(job, keras_compat.distribution.current_distribution())
        stock_layers.split(self, axis)
        with job.grouped[parts].scope():
            type(self).build(self, *args, **kwargs)
        job.split_layers.add(self)

    return build


def _split(layer: Any, kind: type[Any]) -> tuple[int, int] | None:
    """Returns the axis along which a layer's matrix is split and the number of parts, or None.

    What cannot be split so is found when the variable is made.
    """
    distribution = keras_compat.distribution.current_distribution()
    found = model_axis(distribution)
    if found is None or type(layer) is not kind or layer.built:
        return None
    name, parts = found
    matrix, vector = _VARIABLES[kind]
    axes = _axes(distribution, f"{layer.path}/{matrix}")
    of_vector = _axes(distribution, f"{layer.path}/{vector}") if vector else ()
    if axes == (None, name):
        return 1, parts
    if axes == (name, None) and not any(of_vector):
        return 0, parts
    return None


def _adding(job: ScriptJob, stock: Any) -> Any:
    """``Layer.add_weight``, which refuses a layout that the variable does not have."""

    @functools.wraps(stock)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        variable = stock(self, *args, **kwargs)
        distribution = keras_compat.distribution.current_distribution()
        if isinstance(distribution, keras.distribution.ModelParallel):
            axes = _axes(distribution, variable.path)
            if any(axes) and axes != _actual(self, variable.name, distribution):
                raise _refusal(variable, axes, self)
        return variable

    return add_weight


def _actual(layer: Any, name: str, distribution: Any) -> Axes:
    """How a variable that a layer makes is split."""
    axis = model_axis(distribution)
    is_split = isinstance(layer, TensorParallelLayer) and layer.group is not None
    if axis is None or not is_split or name not in layer.axes:
        return ()
    vector = name == "bias"
    return tuple(axis[0] if i == layer.axes[name] else None for i in range(2 - vector))


def _applying(job: ScriptJob, stock: Any) -> Any:
    """``optimizer.apply``, which refuses shards outside of ``fit``."""

    @functools.wraps(stock)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not job.inside and job.split_layers:
            split = set().union(*(layer.shards for layer in job.split_layers))
            if any(id(v) in split for v in trainable_variables or ()):
                raise _only_fit("a training loop of the script's own")
        return stock(self, grads, trainable_variables)

    return apply


def _refusing(job: ScriptJob, stock: Any, what: str) -> Any:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not job.inside and tensor_parallel_variables.split_layers(self):
            raise _only_fit(what)
        return stock(self, *args, **kwargs)

    return method


def _only_fit(what: str) -> UsageError:
    return UsageError(
        f"{what} does not work with layers that ModelParallel has split over ranks",
        hint="model.fit, model.evaluate and model.predict; or "
        "keras.distribution.DataParallel()",
    )


def _refusal(variable: Any, axes: Axes, layer: Any) -> UsageError:
    kind = type(layer).__name__
    return UsageError(
        f"the script's ModelParallel lays out {variable.path!r} of a {kind} as {axes!r}, "
        "and this cannot be split so",
        hint="split a kernel of Dense or the embeddings of Embedding, along one axis: "
        "(None, 'model') or ('model', None); a bias only with the columns of its kernel",
    )


def _axes(distribution: Any, path: str) -> Axes:
    """The layout of a variable; axes of the mesh that have length 1 split nothing."""
    layout = keras_compat.distribution.layout_of(distribution, path)
    if layout is None:
        return ()
    mesh = distribution.device_mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    return tuple(axis if sizes.get(axis, 1) > 1 else None for axis in layout)
