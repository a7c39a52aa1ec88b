"""Pipelines of ``tf.data`` that draw random numbers in several threads at a time."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

import tensorflow as tf

from collective.replacements import replacing
from collective.training.keras_compat.tensorflow_names import determinism

# For each data set, whether an iterator over it draws in an order that is left to chance.
_known: weakref.WeakKeyDictionary[tf.data.Dataset, bool] = weakref.WeakKeyDictionary()
# Operations that draw, or count draws, beside those with "Random" in their name.
_DRAWS = {
    "AssignAddVariableOp",
    "AssignVariableOp",  # of a ``keras.random.SeedGenerator``
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RngReadAndSkip",
    "SampleDistortedBoundingBoxV2",
    "TruncatedNormal",
}


@contextlib.contextmanager
def drawing_in_order() -> Iterator[None]:
    """Inside, pipelines draw random numbers in the order of their elements.

    ``map(function, num_parallel_calls=...)`` draws in the order in which its threads come:
    with a seed, too, each rank, and each run of one process, would get other data. TensorFlow
    can rewrite a pipeline so that what draws runs in order, and the rest of the function in
    parallel as before. It does so if operations must be deterministic when the iterator is
    made. Other pipelines are left as they are: without need it takes them what they read
    ahead.
    """
    stock = tf.data.Dataset.__iter__

    @functools.wraps(stock)
    def iterate(self: tf.data.Dataset) -> object:
        if determinism.is_enabled() or not _draws_by_chance(self):
            return stock(self)
        determinism.enable(True)
        try:
            return stock(self)
        except tf.errors.InvalidArgumentError:
            determinism.enable(False)
            return stock(self)  # draws without a seed, which ranks cannot share
        finally:
            determinism.enable(False)

    with replacing(tf.data.Dataset, "__iter__", iterate):
        yield


def _draws_by_chance(dataset: tf.data.Dataset) -> bool:
    if dataset not in _known:
        is_parallel = getattr(dataset, "_num_parallel_calls", None) is not None
        _known[dataset] = (
            is_parallel and any(map(_draws, dataset._functions()))
        ) or any(map(_draws_by_chance, dataset._inputs()))
    return _known[dataset]


def _draws(function: object) -> bool:
    """Return whether a function of a data set draws, or one that it calls."""
    graph = function.function.graph.as_graph_def()  # type: ignore[attr-defined]
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return any(
        node.op in _DRAWS or ("Random" in node.op and "Stateless" not in node.op)
        for node in nodes
    )
