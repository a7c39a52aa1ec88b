"""Pipelines of ``tf.data`` whose elements, or their order, are left to chance by threads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

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


@contextlib.contextmanager
def keeping_order() -> Iterator[None]:
    """Inside, data sets that are made keep the order of their elements.

    ``deterministic=False`` of a function or of options allows any order, so that of the
    elements is right, too, and it is the same on every rank. TensorFlow obeys a False even
    if operations must be deterministic.
    """
    dataset = tf.data.Dataset
    stock = dataset.with_options

    @functools.wraps(stock)
    def with_options(
        self: tf.data.Dataset, options: tf.data.Options, **kwargs: Any
    ) -> tf.data.Dataset:
        if options.deterministic is False:
            options = tf.data.Options().merge(options)
            options.deterministic = True
        return stock(self, options, **kwargs)

    with contextlib.ExitStack() as inside:
        inside.enter_context(replacing(dataset, "with_options", with_options))
        for name in ("map", "interleave", "batch"):
            method = _in_order(getattr(dataset, name))
            inside.enter_context(replacing(dataset, name, method))
        yield


def _in_order(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("deterministic") is False:
            given.arguments["deterministic"] = True
        return stock(*given.args, **given.kwargs)

    return call


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
