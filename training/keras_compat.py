"""Everything the project takes from inside Keras, in one place.

The step needs three things that Keras does not offer in public: to switch off the
gradient sum inside its optimizers (ours arrive already summed), to see a loss as a
sum and a weight rather than as a mean, and to run a metric without touching its
variables. Checkpoints need a fourth: to write values to Keras' file that the variables
no longer have. Each is a few lines against Keras' own source; each has a test in
``tests/training/test_keras_compat.py`` that fails when Keras changes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state, masking, stateless_scope
from keras.src.losses import loss as keras_loss
from keras.src.models.functional import Functional
from keras.src.ops.function import Function
from keras.src.random import seed_generator
from keras.src.saving import saving_lib

SEED_STATE = "seed_generator_state"


def build(
    model: keras.Model, spec: tuple[Any, Any, Any], optimizer: bool = True
) -> None:
    """Creates every variable of model, loss, metrics and optimizer.

    Args:
        model: A compiled model, in its backend's scope.
        spec: ``(x, y, sample_weight)``, trees of ``tf.TensorSpec`` of one batch.
        optimizer: False: all but those of the optimizer.

    Raises:
        ValueError: When model, loss or metrics do not fit the data.
    """

    def symbolic(leaf: tf.TensorSpec) -> keras.KerasTensor:
        return keras.KerasTensor(tuple(leaf.shape), leaf.dtype.name)

    x, y, sample_weight = (
        None if part is None else tf.nest.map_structure(symbolic, part) for part in spec
    )
    batch = (x, y) if sample_weight is None else (x, y, sample_weight)
    core = core_optimizer(model.optimizer)
    build_parts = core.build
    built = model.optimizer.built
    model.optimizer.built = built or not optimizer
    try:
        with mock.patch.object(core, "build", lambda v: build_parts(parts(v))):
            model._symbolic_build(data_batch=batch)
    finally:
        model.optimizer.built = built or optimizer


def core_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """The optimizer that updates variables, inside a LossScaleOptimizer or not."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def switch_off_gradient_sum(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer take its gradients as they are.

    Under a strategy Keras sums gradients itself, *after* it has clipped them; ours
    are summed before, so that its clipping acts on the true gradient.
    """
    core = core_optimizer(optimizer)
    if not hasattr(core, "_all_reduce_sum_gradients"):
        raise RuntimeError(
            f"keras {keras.__version__} has no _all_reduce_sum_gradients to switch "
            "off; gradients would be summed twice"
        )
    core._all_reduce_sum_gradients = lambda pairs: list(pairs)


def parts(variables: Iterable[Any]) -> list[Any]:
    """The variables, those that a strategy has partitioned as their parts.

    Keras' optimizers know no partitioned variable; each part is one to them.
    """
    found: list[Any] = []
    for variable in variables:
        value = getattr(variable, "value", None)
        found += getattr(value, "variables", [variable])
    return found


def apply(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
) -> None:
    """``optimizer.apply``, also where variables are partitioned."""
    whole = [len(parts([v])) == 1 for v in variables]
    if all(whole):
        optimizer.apply(gradients, variables)
        return
    # By the norm of all of a gradient; the parts have none larger, and stay.
    gradients = core_optimizer(optimizer)._clip_gradients(list(gradients))
    cut: list[tf.Tensor] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        rows = [part.shape[0] for part in parts([variable])] if variable.shape else []
        cut += tf.split(gradient, rows) if len(rows) > 1 else [gradient]
    optimizer.apply(cut, parts(variables))
    for variable, is_whole in zip(variables, whole, strict=True):
        if not is_whole and variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def count_atomically(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer's counter right where several workers count at a time.

    Keras reads it, adds one and writes it, so that counts get lost in between.
    """
    iterations = core_optimizer(optimizer).iterations
    iterations.assign_add = iterations.value.assign_add


def build_in_parts(
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
    lengths: Sequence[int],
) -> tuple[list[keras.Variable], list[tuple[keras.Variable, int]]]:
    """Builds an optimizer for vectors that stand for parts of variables.

    Args:
        optimizer: Not built.
        variables: What it would be built for.
        lengths: Of their parts.

    Returns:
        The parts, zero; and the optimizer's variables that are shaped as a part, each
        with the number of that part.
    """
    core = core_optimizer(optimizer)
    excluded: set[int] = getattr(core, "_exclude_from_weight_decay", set())
    parts = []
    for variable, length in zip(variables, lengths, strict=True):
        part = keras.Variable(
            "zeros", shape=(length,), dtype=variable.dtype, name=variable.name
        )
        part._path = variable.path  # names slots, and excludes from weight decay
        if core._var_key(variable) in excluded:
            excluded.add(core._var_key(part))
        parts.append(part)
    numbers = {id(part): i for i, part in enumerate(parts)}
    made = build_optimizer(optimizer, parts)
    return parts, [(slot, numbers[id(part)]) for slot, part in made]


def build_optimizer(
    optimizer: keras.Optimizer,
    variables: Sequence[keras.Variable],
    beside: bool = False,
) -> list[tuple[keras.Variable, keras.Variable]]:
    """Builds an optimizer that is not built.

    Args:
        optimizer: The optimizer.
        variables: Of the model.
        beside: Whether to put what is kept for a variable on the variable's device.

    Returns:
        Its variables that are shaped as one of the model's, each with that one.
    """
    core = core_optimizer(optimizer)
    slots: list[tuple[keras.Variable, keras.Variable]] = []
    make = core.add_variable_from_reference

    def noted(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
        device = tf.device(reference_variable.value.device) if beside else None
        with device or contextlib.nullcontext():
            made = make(reference_variable, *args, **kwargs)
        slots.append((made, reference_variable))
        return made

    with mock.patch.object(core, "add_variable_from_reference", noted):
        optimizer.build(variables)
    return slots


def replace_clipping(
    optimizer: keras.Optimizer,
    clip: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
    """Makes the optimizer clip un-scaled gradients by a function; returns its own."""
    core = core_optimizer(optimizer)
    own, core._clip_gradients = core._clip_gradients, clip
    return own


@contextlib.contextmanager
def shaped(shapes: Sequence[tuple[keras.Variable, tuple[int, ...]]]) -> Iterator[None]:
    """Inside, variables take values of these shapes in a StatelessScope."""
    with contextlib.ExitStack() as stack:
        for variable, shape in shapes:
            stack.enter_context(mock.patch.object(variable, "_shape", shape))
        yield


def loss_scale(optimizer: keras.Optimizer) -> tf.Tensor:
    """What the optimizer multiplies the loss with; ``apply`` divides it out."""
    return tf.cast(optimizer.scale_loss(tf.ones([], tf.float32)), tf.float32)


def expects_overflow(optimizer: keras.Optimizer) -> bool:
    """Whether the optimizer itself skips updates that are not finite."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def finish(model: keras.Model) -> None:
    """What Keras does at the end of ``fit``: an average of weights replaces them."""
    core = core_optimizer(model.optimizer)
    core.finalize_variable_values(parts(model.trainable_variables))


@contextlib.contextmanager
def global_seeds(draw: Callable[[int], tf.Tensor]) -> Iterator[None]:
    """Gives functions of ``keras.random`` that were given no seed one of ours.

    Keras' global generator would be read once, when the graph is made, and give the
    same numbers in every step.

    Args:
        draw: Makes the seed (int32, shape [2]) of the n-th such call in the graph.
    """
    calls = itertools.count()

    class Generator:
        def next(self, ordered: bool = True) -> tf.Tensor:
            return tf.cast(draw(next(calls)), keras.src.backend.random_seed_dtype())

    with mock.patch.object(seed_generator, "global_seed_generator", Generator):
        yield


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether the variable is the state of a ``keras.random.SeedGenerator``."""
    return variable.name == SEED_STATE and tuple(variable.shape) == (2,)


def takes_training(model: keras.Model) -> bool:
    """Whether the model's ``call`` has a ``training`` argument."""
    return bool(model._call_has_training_arg)


def tf_variable(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable behind a Keras one."""
    return variable.value


def overrides(model: keras.Model, method: str) -> bool:
    """Whether the user's class replaces a method of ``keras.Model``."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


# --- losses as sums -------------------------------------------------------------

Reduce = Callable[[tf.Tensor, Any, Any, str], tf.Tensor]


@contextlib.contextmanager
def reduced_by(reduce: Reduce) -> Iterator[None]:
    """Replaces the mean at the end of every Keras loss.

    Args:
        reduce: Gets ``(values, sample_weight, mask, reduction)`` of one loss, the
            values per row, and returns the scalar that Keras goes on with.
    """

    def patched(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> tf.Tensor:
        def to(value: Any) -> Any:
            return None if value is None else keras.ops.convert_to_tensor(value, dtype)

        return reduce(to(values), to(sample_weight), mask, reduction)

    with mock.patch.object(keras_loss, "reduce_weighted_values", patched):
        yield


def same_rank(values: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives values and weights the same rank, by Keras' own rule."""
    return keras_loss.squeeze_or_expand_to_same_rank(values, weight)


def compiled_loss(model: keras.Model, y: Any, y_pred: Any, weight: Any) -> Any:
    """The weighted sum of the compiled losses; None where none is compiled."""
    compiled = model._compile_loss
    return None if compiled is None else compiled(y, y_pred, weight)


def own_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, weight: Any, added: list[Any]
) -> tf.Tensor:
    """What a user's own ``compute_loss`` returns, given the added losses."""
    model._losses_override = added
    try:
        return model.compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=weight, training=True
        )
    finally:
        model._losses_override = []


# --- metrics without state --------------------------------------------------------


def loss_trackers(model: keras.Model) -> list[keras.metrics.Metric]:
    """The trackers of the losses of single outputs, in the order of the losses."""
    compiled = model._compile_loss
    return list(compiled.metrics) if compiled is not None else []


def metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The model's metrics, less the trackers of its losses."""
    trackers = [id(m) for m in loss_trackers(model)]
    if getattr(model, "_loss_tracker", None) is not None:
        trackers.append(id(model._loss_tracker))
    return [m for m in model.metrics if id(m) not in trackers]


def metric_sums(
    model: keras.Model, state: Sequence[tf.Tensor], *batch: Any
) -> list[tf.Tensor]:
    """What one batch makes of the metrics' variables.

    Args:
        model: The model.
        state: Values of the variables of ``metrics(model)`` before the batch.
        batch: ``x, y, y_pred, sample_weight``.

    Returns:
        The values after it. No variable is written, nor is one read: Keras computes
        results too, also of its loss trackers, and reading those is a collective
        under MultiWorkerMirroredStrategy.
    """
    variables = [v for m in metrics(model) for v in m.variables]
    mapping = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    mapping += zip(variables, state, strict=True)
    with keras.StatelessScope(state_mapping=mapping) as scope:
        model.compute_metrics(*batch)
    return [
        state[i] if (value := scope.get_current_value(v)) is None else value
        for i, v in enumerate(variables)
    ]


def metric_results(model: keras.Model, state: Sequence[Any]) -> dict[str, Any]:
    """The results of all metrics for given values of their variables.

    Only the given values are read: reading a metric's own variable is a collective
    under MultiWorkerMirroredStrategy, and this runs on rank 0 alone.
    """
    found = metrics(model)
    variables = [v for m in found for v in m.variables]
    results: dict[str, Any] = {}
    with keras.StatelessScope(state_mapping=list(zip(variables, state, strict=True))):
        for metric in found:
            result = metric.result()
            results |= result if isinstance(result, dict) else {metric.name: result}
    return {name: _number(value) for name, value in results.items()}


def _number(value: Any) -> Any:
    """A float, or an array where a metric has several results (F1Score)."""
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


# --- calls of layers, one block after the other -----------------------------------


@dataclass(frozen=True, eq=False)
class Node:
    """An operation in a functional model. Tensors are known by a number.

    Attributes:
        operation: The layer.
        name: Of the layer.
        is_model: Whether it is a model of layers itself.
        inputs: What it needs.
        outputs: What it makes, and the bytes of that in a row of the batch.
        compute: Given the values of its inputs, adds those of its outputs.
    """

    operation: Any
    name: str
    is_model: bool
    inputs: frozenset[int]
    outputs: dict[int, int]
    compute: Callable[[dict[int, Any]], None]


@contextlib.contextmanager
def calls_replaced(
    model: keras.Model,
    graph: Callable[[list[Node], set[int], dict[int, Any]], None],
    one: Callable[[keras.Layer, Callable[[], Any]], Any],
) -> Iterator[None]:
    """Replaces how a model, and the models in it, call their layers.

    Args:
        model: The model.
        graph: Computes a functional model: gets its nodes in order, the tensors that
            are wanted, and the values of its inputs, to which it adds the others.
        one: Calls a layer of another model: gets the layer and the call.
    """
    by_hand = set(map(id, _called_by_hand(model)))
    plain = keras.layers.Layer.__call__

    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in by_hand:
            return plain(self, *args, **kwargs)
        return one(self, lambda: plain(self, *args, **kwargs))

    def run(
        self: Function, inputs: Any, operation_fn: Any = lambda op: op, **_: Any
    ) -> Any:
        values = dict(
            zip(map(id, self.inputs), keras.tree.flatten(inputs), strict=True)
        )
        nodes, known = [], set(values)
        for depth in sorted(self._nodes_by_depth, reverse=True):
            for node in self._nodes_by_depth[depth]:
                needed = frozenset(map(id, node.input_tensors))
                if node.operation and not node.is_input and needed <= known:
                    nodes.append(_node(node, needed, operation_fn))
                    known |= set(nodes[-1].outputs)
        graph(nodes, set(map(id, self.outputs)), values)
        found = [values[id(x)] for x in self.outputs]
        return keras.tree.pack_sequence_as(self._outputs_struct, found)

    with (
        mock.patch.object(keras.layers.Layer, "__call__", call),
        mock.patch.object(Function, "_run_through_graph", run),
    ):
        yield


def _node(node: Any, needed: frozenset[int], operation_fn: Any) -> Node:
    def compute(values: dict[int, Any]) -> None:
        args, kwargs = node.arguments.fill_in(values)
        made = operation_fn(node.operation)(*args, **kwargs)
        values.update(
            zip(map(id, node.outputs), keras.tree.flatten(made), strict=False)
        )

    return Node(
        node.operation,
        node.operation.name,
        isinstance(node.operation, keras.Model),
        needed,
        {id(x): _row_bytes(x) for x in node.outputs},
        compute,
    )


def _row_bytes(tensor: keras.KerasTensor) -> int:
    numbers = math.prod(d or 1 for d in tensor.shape)
    return numbers * tf.as_dtype(tensor.dtype).size


def layers_in_order(model: keras.Model) -> list[tuple[keras.Layer, int]] | None:
    """The layers of a Sequential or functional model, those of models in it included.

    Returns:
        In the order of their first call, each with the bytes that it makes of a row;
        None for a model that calls its layers in Python.
    """
    inner = getattr(model, "_functional", None) or model
    if not isinstance(inner, Functional) or type(inner).call is not Functional.call:
        return None
    found: dict[int, tuple[keras.Layer, int]] = {}
    for depth in sorted(inner._nodes_by_depth, reverse=True):
        for node in inner._nodes_by_depth[depth]:
            operation = node.operation
            if operation is None or node.is_input:
                continue
            below = isinstance(operation, keras.Model) and layers_in_order(operation)
            made = sum(_row_bytes(x) for x in node.outputs)
            for layer, size in below or [(operation, made)]:
                before = found.get(id(layer), (layer, 0))[1]
                found[id(layer)] = layer, before + size
    return list(found.values())


def copied(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor again, on the current device, with its mask."""
    copy, mask = tf.identity(tensor), masking.get_keras_mask(tensor)
    if mask is not None:
        masking.set_keras_mask(copy, tf.identity(mask))
    return copy


def move(variable: keras.Variable, device: str) -> None:
    """Puts a variable on another device; who holds it keeps holding it."""
    with tf.init_scope(), tf.device(device):
        variable._initialize(tf.identity(variable.value))


def update_beside(optimizer: keras.Optimizer) -> None:
    """Makes the optimizer update each variable on the variable's device."""
    core = core_optimizer(optimizer)
    update = core.update_step

    def beside(gradient: Any, variable: Any, learning_rate: Any) -> Any:
        with tf.device(variable.device):
            return update(gradient, variable, learning_rate)

    core.update_step = beside


def _called_by_hand(model: keras.Model) -> Iterator[keras.Layer]:
    """The layers that Python code of the user calls, those of models in it included."""
    inner = getattr(model, "_functional", None) or model
    by_graph = isinstance(inner, Functional) and type(inner).call is Functional.call
    for layer in model._flatten_layers(include_self=False, recursive=False):
        if isinstance(layer, keras.Model):
            yield from _called_by_hand(layer)
        elif not by_graph:
            yield layer


class InnerScope(keras.StatelessScope):
    """A scope in the current one, to which it hands on nothing by itself."""

    def __init__(self) -> None:
        self.outer = stateless_scope.get_stateless_scope()
        super().__init__(collect_losses=self.outer.collect_losses)
        self.state_mapping = dict(self.outer.state_mapping)

    def effects(self, outputs: Any) -> tuple[list[Any], dict[int, Any], list[Any]]:
        """What calls inside have done: losses, new values, and masks of the outputs."""
        before = self.outer.state_mapping
        new = {i: v for i, v in self.state_mapping.items() if before.get(i) is not v}
        masks = [masking.get_keras_mask(t) for t in tf.nest.flatten(outputs)]
        return list(self.losses), new, masks

    def hand_out(self, model: keras.Model, outputs: Any, effects: Any) -> None:
        """Does the same in the outer scope, with tensors of the outer graph."""
        losses, new, masks = effects
        self.outer.state_mapping.update(new)
        for tensor, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
            if mask is not None:
                masking.set_keras_mask(tensor, mask)
        for old, loss in zip(self.losses, losses, strict=True):
            self.outer.add_loss(loss)
            for layer in model._flatten_layers():
                if id(old) in layer._loss_ids:
                    layer._loss_ids.remove(id(old))
                    layer._loss_ids.add(id(loss))


# --- Keras' file of weights -------------------------------------------------------

# What Keras leaves out of a file, by kind of object. It makes an optimizer to find
# that out, each time, and variables cannot be made in a StatelessScope.
_skipped = functools.cache(saving_lib.get_attr_skipset)


@contextlib.contextmanager
def _skips_known() -> Iterator[None]:
    """Keras finds out nothing of that inside."""
    for kind in ("Layer", "Functional", "Sequential", "Metric", "Optimizer", "Loss"):
        _skipped(kind)
    with mock.patch.object(saving_lib, "get_attr_skipset", _skipped):
        yield


class _Alias:
    """A value that Keras can take for a tensor, and write without copying it."""

    def __init__(self, array: np.ndarray):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def numpy(self) -> _Alias:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype, copy=False)


class _Given(keras.StatelessScope):
    """Variables have given values, and those that are read are remembered."""

    def __init__(self, values: Iterable[tuple[keras.Variable, np.ndarray]]):
        super().__init__()
        self.state_mapping = {id(v): _Alias(value) for v, value in values}
        self.read: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """The given value."""
        self.read.add(id(variable))
        return super().get_current_value(variable)


class _Store(saving_lib.H5IOStore):
    """Keras' store, without the copy that it makes of a variable."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, keras.Variable):
            value = value.value
        super().__setitem__(key, value)


class _File(io.BytesIO):
    """A file for HDF5 that never fails before it is closed.

    HDF5 ends the process (``h5py`` 3.16) where a disk turns out to be full while it
    closes a file. Here it writes on in peace, and the error is raised behind it.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._file = path.open("w+b", buffering=0)
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of it, if that is still possible."""
        view = memoryview(data).cast("B")
        size, done = len(view), 0
        try:
            while self._error is None and done < size:
                done += self._file.write(view[done:])
        except OSError as error:
            self._error = error
        return size

    def seek(self, place: int, whence: int = 0) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        try:
            return self._file.truncate(size)
        except OSError as error:
            self._error = self._error or error
            return size or 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        got = self._file.readinto(view) or 0
        view[got:] = bytes(len(view) - got)
        return len(view)

    def __exit__(self, *_: Any) -> None:
        """Brings it to the disk; raises what went wrong."""
        with self._file as file:
            if self._error is not None:
                raise self._error
            os.fsync(file.fileno())


def save_weights(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    values: Sequence[np.ndarray],
    path: Path,
) -> list[int]:
    """``model.save_weights``, with values that variables had at another time.

    May run in a thread of its own while the model trains. No variable is read.

    Args:
        model: A built and compiled model.
        variables: Of model and optimizer.
        values: Theirs.
        path: A file to make; its name ends in ``.weights.h5``.

    Returns:
        The indices of the variables that Keras' format does not hold.

    Raises:
        OSError: If it cannot be written, or not brought to the disk.
    """
    # Metrics in a model's attributes are written, too; ours count elsewhere.
    zeros = [(v, np.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    given = _Given([*zeros, *zip(variables, values, strict=True)])
    with (
        _skips_known(),
        _File(path) as file,
        given,
    ):
        store = _Store(file, mode="w")
        try:
            saving_lib._save_state(
                model,
                weights_store=store,
                assets_store=None,
                inner_path="",
                visited_saveables=set(),
            )
        finally:
            store.close()  # HDF5 bears no file that is closed before its own
    return [i for i, v in enumerate(variables) if id(v) not in given.read]


def load_weights(
    model: keras.Model, variables: Sequence[keras.Variable], path: str
) -> list[np.ndarray | None]:
    """What ``model.load_weights`` would assign; nothing is assigned.

    Returns:
        The values of the variables, None for those that the file does not hold.
    """
    with _skips_known(), keras.StatelessScope() as scope:
        model.load_weights(path)
    found = [scope.get_current_value(v) for v in variables]
    return [None if value is None else np.asarray(value) for value in found]


def global_seed_state() -> keras.Variable | None:
    """The state of the generator that ``keras.random`` uses without a seed, if any."""
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state


def make_global_seed_state() -> keras.Variable:
    """The same, made if it was not there."""
    return seed_generator.global_seed_generator().state
