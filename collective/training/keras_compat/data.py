"""Keras' own ways to read data, and the batches and epochs that it makes of them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import (
    TFEpochIterator,
    concat,
)
from keras.src.trainers.data_adapters import (
    array_slicing,
    data_adapter_utils,
    get_data_adapter,
)
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.utils.python_utils import pythonify_logs
from tensorflow.python.eager import context

from collective.replacements import replacing


def is_array(value: object) -> bool:
    """Return whether Keras takes the value for one array: NumPy, tensor, pandas, SciPy."""
    if value is None or getattr(value, "shape", None) == ():
        return False
    return bool(array_slicing.can_slice_array(value))


def as_dense_or_sparse(value: Any) -> Any:
    """Return an array that ``is_array`` as NumPy array, RaggedTensor or SparseTensor."""
    if data_adapter_utils.is_scipy_sparse(value):
        return data_adapter_utils.scipy_sparse_to_tf_sparse(value)
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor, np.ndarray)):
        return value
    if isinstance(value, (tf.Tensor, tf.Variable, keras.Variable)):
        value = keras.ops.convert_to_numpy(value)
    array = np.asarray(value)
    series = array.ndim == 1 and type(value).__module__.split(".")[0] == "pandas"
    return array[:, None] if series else array


def sparse_by_rows(tensor: tf.SparseTensor) -> object:
    """Return the tensor in a form whose rows can be read in any order."""
    return array_slicing.to_tensorflow_sparse_wrapper(tf.sparse.reorder(tensor))


def sparse_rows(by_rows: object, rows: tf.Tensor) -> tf.SparseTensor:
    """Return rows of a tensor from its form by ``sparse_by_rows``."""
    return array_slicing.slice_tensorflow_sparse_wrapper(by_rows, rows)


def class_weights(y: Any, weights: dict[int, float]) -> np.ndarray:
    """Return the weight of each row, by its class: float ``[rows]``."""
    return data_adapter_utils.class_weight_to_sample_weights(y, weights)


def adapter(
    data: Any, class_weight: dict[int, float] | None = None, shuffle: bool = False
) -> DataAdapter:
    """Return Keras' adapter of a ``tf.data.Dataset``, ``PyDataset``, generator or DataLoader.

    Args:
        shuffle: Whether Keras mixes the items of a ``PyDataset`` again in each epoch.

    Raises:
        ValueError: Keras does not accept the data, or not with a ``class_weight``.
    """
    return get_data_adapter(data, class_weight=class_weight, shuffle=shuffle)


def unpack(element: Any) -> tuple[Any, Any, Any]:
    """Return ``(x, y, sample_weight)`` of a batch; parts that it does not have are None."""
    x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(element)
    return _without_optionals(x), _without_optionals(y), _without_optionals(weight)


def _without_optionals(part: Any) -> Any:
    """Replace each optional that Keras writes inside ``tf.data`` by None."""

    def one(leaf: Any) -> Any:
        absent = isinstance(leaf, (tf.experimental.Optional, tf.OptionalSpec))
        return None if absent else leaf

    return keras.tree.map_structure(one, part)


def passes(
    array: np.ndarray, batch_size: int, shuffle: bool | str, seed: int
) -> Iterator[np.ndarray]:
    """Yield batches, pass after pass, in ``fit``'s order of rows with TensorFlow's seed."""
    with tf.init_scope(), seeded(seed):
        adapter = ArrayDataAdapter(array, batch_size=batch_size, shuffle=shuffle)
        batches = adapter.get_tf_dataset()
    while True:
        yield np.concatenate(list(batches.as_numpy_iterator()))


def tensorflow_seed() -> int | None:
    """Return TensorFlow's global seed, or None if it is not set.

    Keras' order of rows depends on it, and ``keras.backend.clear_session`` keeps it.
    """
    seed = context.global_seed()
    return None if seed is None else int(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, TensorFlow has this global seed; its generator of seeds goes on."""
    with replacing(context, "global_seed", lambda: seed):
        yield


@contextlib.contextmanager
def tensorflow_draws_unchanged() -> Iterator[None]:
    """Put back the generator of the seeds of eager ``tf.random`` operations."""
    generator = context.context()._rng
    before = generator.getstate()
    try:
        yield
    finally:
        generator.setstate(before)


def limit_generator(data: DataAdapter, batches: int) -> None:
    """Have a pass over a Python generator take so many batches, and none ahead.

    Pipelines read ahead as far as they can. The next pass would begin with different batches
    on each rank; with Keras alone it begins differently from run to run.
    """
    if isinstance(data, GeneratorDataAdapter):
        endless = data.generator
        data.generator = lambda: itertools.islice(endless(), batches)


@contextlib.contextmanager
def no_reading_ahead(passes: int = 1) -> Iterator[None]:
    """Inside, Keras takes as many batches of a Python generator as it makes steps.

    Only where it is told the number of steps. See ``limit_generator``.

    Args:
        passes: So many passes follow each other in the first data that are opened. Keras
            opens those of ``fit`` once for all epochs, and before those of its validation.
    """
    stock, first = TFEpochIterator.__init__, [passes]

    def init(self: TFEpochIterator, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        count = first.pop() if first else 1
        if self.steps_per_epoch:
            together = self.steps_per_execution
            steps = math.ceil(self.steps_per_epoch / together) * together
            limit_generator(self.data_adapter, count * steps)

    with replacing(TFEpochIterator, "__init__", init):
        yield


def restored(data: DataAdapter, x: Any) -> Any:
    """Return the data of an adapter, with the batches of a generator that it has read."""
    if not isinstance(data, GeneratorDataAdapter):
        return x
    return (batch for batch in data.generator())


def concatenated(batches: Sequence[Any]) -> Any:
    """Return the outputs of ``predict`` for several batches, as Keras joins those of one execution."""
    return keras.tree.map_structure(lambda *parts: concat(list(parts)), *batches)


def as_numbers(logs: Any) -> dict[str, Any]:
    """Return what a step returned as Keras gives it to callbacks."""
    return dict(pythonify_logs(logs))


_datasets = itertools.count()  # of this process, alike on every rank
# Takes the numbers of rows and the number of a pass over them, and returns them mixed.
Shuffle = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@contextlib.contextmanager
def shuffled_by(make: Callable[[], Shuffle]) -> Iterator[Callable[[], None]]:
    """Have shuffled arrays come in an order of ours in each epoch.

    Args:
        make: Called for each data set that is made of arrays.

    Yields:
        What has the next pass be the first: Keras reads a batch to build a model.
    """
    stock, counters = ArrayDataAdapter.get_tf_dataset, list[tf.Variable]()

    def get_tf_dataset(self: Any) -> tf.data.Dataset:
        with tf.device("CPU"):
            passes = tf.Variable(0, trainable=False, dtype=tf.int64)
        counters.append(passes)
        mixed = make()

        def shuffle(indices: tf.Tensor) -> tf.Tensor:
            return mixed(indices, passes.assign_add(1) - 1)

        with replacing(tf.random, "shuffle", shuffle):
            found = stock(self)
        found._passes = passes  # it must live as long as the data set
        return found

    def begin() -> None:
        for passes in counters:
            passes.assign(0)

    with replacing(ArrayDataAdapter, "get_tf_dataset", get_tf_dataset):
        yield begin


@contextlib.contextmanager
def other_order_each_epoch(seed: int) -> Iterator[None]:
    """Have shuffled arrays come in a new order in each epoch.

    Keras shuffles by an operation without a seed of its own. If TensorFlow has a global
    seed, it draws the same order in each epoch.

    Args:
        seed: Determines the orders.
    """

    def make() -> Shuffle:
        key = (seed + next(_datasets)) % 2**31
        mix = tf.random.experimental.stateless_shuffle
        return lambda indices, number: mix(indices, seed=[key, number + 1])

    with shuffled_by(make):
        yield
