"""What ``fit``, ``evaluate`` and ``predict`` are given, made one of two kinds of data.

Rows that can be read by number become a ``Source``: arrays, trees of them, tensors,
pandas. What gives ready made batches becomes one of Keras' adapters: a batched
``tf.data.Dataset``, a ``keras.utils.PyDataset``, a generator, a DataLoader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError, first_line
from collective.training import keras_compat
from collective.training.input.arrays import Arrays
from collective.training.input.conversion import as_source
from collective.training.input.distributed_datasets import original
from collective.training.input.leaves import slice_leaf
from collective.training.input.row_order import ROWS, WITHIN_BATCHES
from collective.training.input.shuffled_items import ShuffledItems
from collective.training.input.source import Row, Source
from collective.training.input.views import CastFloats
from collective.training.process.object_collectives import broadcast_object

Data: TypeAlias = "Source | keras_compat.data.DataAdapter"
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class FitData:
    """The data of a training; ``batch_size`` is without meaning if they are batches."""

    train: Data
    batch_size: int
    validation: Data | None
    validation_batch_size: int | None


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """The arguments of ``fit`` that are about data; it says what each means."""

    x: Any
    y: Any
    batch_size: int | None
    validation_split: float
    validation_data: Any
    shuffle: bool | str
    class_weight: Mapping[int, float] | None
    sample_weight: Any
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    seed: int | None
    data: Any
    global_batch_size: int | None


def fit_data(given: DataArguments) -> FitData:
    """Return the data to train on, and to validate with."""
    x, y, sample_weight = given.x, given.y, given.sample_weight
    batch_size, class_weight = given.batch_size, given.class_weight
    of_rows = given.data is not None or given.global_batch_size is not None
    if of_rows:
        if batch_size is not None:
            raise UsageError(
                "batch_size= and global_batch_size= are the same",
                hint="pass batch_size=; it counts the rows of all replicas together",
            )
        if given.data is not None and x is not None:
            raise UsageError("both x and data= are given", hint="pass x and y only")
        x, y, sample_weight = _in_one(x, y, sample_weight, given.data)
        batch_size = given.global_batch_size
    train: Data
    if given.validation_split and given.validation_data is None:
        parts = arrays_of(x, y, sample_weight)
        train_part, rest = _split(parts, given.validation_split)
        train = _source(*_weighted(*train_part, class_weight))
        validation: Data | None = _source(*_weighted(*rest, None))
    else:
        order = given.seed, given.shuffle
        train = as_data(x, y, sample_weight, class_weight, of_rows, *order)
        validation = _validation(given.validation_data, of_rows)
    if batch_size is None:
        batch_size = default_batch_size(train, given.steps_per_epoch)
        return FitData(train, batch_size, validation, given.validation_batch_size)
    size = given.validation_batch_size or batch_size
    return FitData(train, batch_size, validation, size)


def as_data(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    of_rows: bool = False,
    seed: int | None = 0,
    shuffle: bool | str = False,
) -> Data:
    """Return the data of ``x``, ``y`` and ``sample_weight`` as Keras takes them.

    Args:
        x, y, sample_weight: As for ``keras.Model.fit``; x may be a ``Source``.
        class_weight: The weight of each class of y.
        of_rows: Whether a ``tf.data.Dataset`` has single rows.
        seed, shuffle: The order of the items of a ``PyDataset``; without a seed Keras'
            own, if the script has set one.

    Raises:
        UsageError: They are not data.
    """
    if x is None:
        raise UsageError("no data are given: x is None", hint="fit(model, x, y)")
    x = original(x)
    if isinstance(x, keras_compat.data.DataAdapter):
        return x
    rows = isinstance(x, tf.data.Dataset) and of_rows
    if not (rows or isinstance(x, Source)) and is_array_data(x):
        return _source(*_weighted(*arrays_of(x, y, sample_weight), class_weight))
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise UsageError(
                f"{name} is given beside a {type(x).__name__}",
                hint=f"have x give (x, y) or (x, y, sample_weight), and leave {name}= "
                "out",
            )
    if rows or isinstance(x, Source):
        if class_weight is not None:
            raise UsageError(
                f"class_weight= cannot be used with a {type(x).__name__}",
                hint="have it give (x, y, sample_weight)",
            )
        return as_source(x)
    mixed = isinstance(x, keras.utils.PyDataset) and bool(shuffle)
    as_keras = seed is None and keras_compat.data.tensorflow_seed() is not None
    if mixed and not as_keras and x.num_batches is not None:
        x, mixed = ShuffledItems(x, seed or 0), False
    weights = dict(class_weight) if class_weight else None
    try:
        return keras_compat.data.adapter(x, weights, shuffle=mixed and as_keras)
    except ValueError as error:
        first = first_line(error)
        raise UsageError(
            f"a {type(x).__name__} cannot be trained on: {first}"[:300],
            hint="pass arrays, a tf.data.Dataset of batches, a keras.utils.PyDataset, "
            "a generator of batches or a torch DataLoader",
        ) from error


def plan_shuffle(
    data: Source, shuffle: bool | str, seed: int | None, backend: Backend
) -> tuple[bool | str, int]:
    """Return ``RowPlan.shuffle`` and its seed for ``fit``'s arguments; every rank calls it.

    Keras' own order follows from the seed of the script, if it has set one: rank 0's.
    """
    of_script = keras_compat.data.tensorflow_seed()
    if backend.size > 1 and not backend.elastic:  # whatever the arguments of this rank
        of_script = broadcast_object(backend, of_script)
    of_arrays = isinstance(data, Arrays | CastFloats)
    if not shuffle or seed is not None or not of_arrays:
        return bool(shuffle), seed or 0
    if of_script is None:
        return True, 0
    return (WITHIN_BATCHES if shuffle == "batch" else ROWS), of_script


def arrays_of(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return trees of arrays, RaggedTensors and SparseTensors: lists become tuples."""
    x, y = _tree(x, "x"), _tree(y, "y")
    weight = _tree(sample_weight, "sample_weight")
    outputs = isinstance(y, (tuple, dict))
    if weight is not None and outputs and not isinstance(weight, (tuple, dict)):
        # One weight for each row: it counts for every output.
        weight = keras.tree.map_structure(lambda _: weight, y)
    return x, y, weight


def is_array_data(x: Any) -> bool:
    """Return whether Keras takes a value for arrays, or a tree of them."""
    return keras_compat.data.is_array(x) or isinstance(x, (tuple, list, Mapping))


def _tree(part: Any, name: str) -> Any:
    """Return a tree of dicts and tuples with arrays as leaves."""
    if isinstance(part, Mapping):
        return {key: _tree(value, f"{name}[{key!r}]") for key, value in part.items()}
    lists = isinstance(part, (tuple, list))
    if (
        lists
        and (isinstance(part, tuple) or any(is_array_data(item) for item in part))
        and not _is_rows(part)
    ):
        return tuple(_tree(item, f"{name}[{i}]") for i, item in enumerate(part))
    if part is None or not keras_compat.data.is_array(part):
        return part  # Arrays says what is wrong with it
    array = keras_compat.data.as_dense_or_sparse(part)
    if isinstance(array, np.ndarray) and array.dtype == np.object_:
        items = array.reshape(-1).tolist()
        if all(isinstance(item, (str, bytes)) for item in items):
            text = any(isinstance(item, str) for item in items)
            return array.astype("U" if text else "S")
    return array


def _is_rows(part: Any) -> bool:
    """Return whether a list holds rows written out in numbers, and is one array."""
    return all(not _has_array(item) for item in part) and not isinstance(part, tuple)


def _has_array(item: Any) -> bool:
    if isinstance(item, (list, tuple)):
        return any(_has_array(one) for one in item)
    return isinstance(item, Mapping) or keras_compat.data.is_array(item)


def _source(x: Any, y: Any, sample_weight: Any) -> Source:
    source = Arrays(x, y, sample_weight)
    cast = CastFloats(source, keras.config.floatx())
    return cast if cast.is_needed else source


def _weighted(
    x: Any, y: Any, weight: Any, class_weight: Mapping[int, float] | None
) -> tuple[Any, Any, Any]:
    """Return the arrays, with the weights of the classes as ``sample_weight``."""
    if class_weight is None:
        return x, y, weight
    if weight is not None:
        raise UsageError(
            "both class_weight= and sample_weight= are given",
            hint="multiply them, and pass sample_weight= only",
        )
    if y is None or isinstance(y, (tuple, dict)):
        raise UsageError(
            "class_weight= needs a y that is one array",
            hint="pass sample_weight=, an array for each output",
        )
    return x, y, keras_compat.data.class_weights(y, dict(class_weight))


def _split(parts: Row, share: float) -> tuple[Row, Row]:
    """Return all rows but the last ``share`` of them, and those."""
    leaves = [leaf for leaf in tf.nest.flatten(parts) if leaf is not None]
    if not all(hasattr(leaf, "shape") for leaf in leaves):
        raise UsageError(
            "validation_split= needs arrays, and x is none",
            hint="pass validation_data=",
        )
    rows = int(leaves[0].shape[0])
    at = math.floor(rows * (1 - share))
    if not 0 < at < rows:
        raise UsageError(
            f"validation_split={share} of {rows} rows leaves no rows on one side",
            hint="pass a number between 0 and 1, and more rows",
        )

    def cut(start: int, stop: int) -> Row:
        return tf.nest.map_structure(
            lambda t: None if t is None else slice_leaf(t, start, stop), parts
        )

    return cut(0, at), cut(at, rows)


def _validation(data: Any, of_rows: bool) -> Data | None:
    if data is None:
        return None
    if of_rows and isinstance(data, tuple):
        return as_source(data)
    if isinstance(data, (tuple, list)):
        if len(data) not in (1, 2, 3):
            raise UsageError(
                f"validation_data= has {len(data)} parts",
                hint="pass (x,), (x, y) or (x, y, sample_weight)",
            )
        return as_data(*data)
    return as_data(data, of_rows=of_rows)


def _in_one(x: Any, y: Any, sample_weight: Any, data: Any) -> tuple[Any, Any, Any]:
    """Read ``data=``, or with ``global_batch_size=`` a tuple in place of x: (x, y[, w])."""
    given = x if data is None else data
    if y is not None or sample_weight is not None:
        return given, y, sample_weight
    if isinstance(given, tuple) and len(given) in (2, 3):
        source: Any = as_source(given)
        return source, None, None
    if not isinstance(given, (Source, tf.data.Dataset)):
        as_source(given)  # says what is expected
    return given, None, None


def default_batch_size(data: Data, steps: int | None) -> int:
    """Return Keras' default of 32, or the size that gives this number of steps."""
    if isinstance(data, Source) and steps:
        return max(1, math.ceil(len(data) / steps))
    return DEFAULT_BATCH_SIZE
