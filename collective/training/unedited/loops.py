"""Training loops of a script's own, on every rank: ``--keras --loops``.

A loop runs whole on every rank, but for its ``tf.function``s. One that is called with a
batch and uses variables is partitioned by the rows of that batch, as it was traced: what
it returns, and what it leaves in variables, is that of the whole batch. So everything
around it is what one process computes. ``train_on_batch`` and its sisters call such
functions of Keras' own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.backends.capabilities import LocalDevices
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.plan import share
from collective.training.keras_compat.traced import traced
from collective.training.partition.backend_exchange import BackendExchange
from collective.training.partition.devices import supports
from collective.training.partition.layouts import ROWS, WHOLE
from collective.training.partition.partition import Partition
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share
from collective.training.unedited.script_job import LOOP, ScriptJob

_OTHER_ROWS = "collective: ranks have other rows in a batch of"


def distribute_loops(job: ScriptJob) -> None:
    """Make functions that are called with a batch compute each rank's rows of it.

    Raises:
        UsageError: The backend is not one replica in each process.
    """
    if not supports(job.backend) or isinstance(job.backend, LocalDevices):
        raise UsageError(
            f"--loops needs a backend with one replica in each process, and "
            f"{job.backend.name!r} has a strategy of its own",
            hint="--backend native or mpi",
        )
    owner = keras_compat.calls.function_class()
    stock = owner.__call__
    # The steps of each function, by the graph that its arguments choose.
    steps: weakref.WeakKeyDictionary[Any, dict[Any, LoopStep | None]] = (
        weakref.WeakKeyDictionary()
    )

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nested = job.inside or not tf.executing_eagerly()
        eager = tf.config.functions_run_eagerly()
        if nested or eager or not keras_compat.calls.computes_batches(self):
            return stock(self, *args, **kwargs)
        leaves = _leaves(self, args, kwargs)
        if not any(map(_is_array, leaves)):
            return stock(self, *args, **kwargs)
        source = self.get_concrete_function(*args, **kwargs)
        known = steps.setdefault(self, {})
        if source not in known:
            known[source] = LoopStep.of(job, source, leaves)
        step = known[source]
        return stock(self, *args, **kwargs) if step is None else step(leaves)

    job.replace(owner, "__call__", call)


class LoopStep:
    """A concrete function, of which each rank computes its rows."""

    def __init__(self, job: ScriptJob, source: Any, leaves: Sequence[Any], rows: int):
        self.backend = job.backend
        self.source = source
        self._has_rows = [_is_array(v) and v.shape[0] == rows for v in leaves]
        layouts = [ROWS if has_rows else WHOLE for has_rows in self._has_rows]
        inputs = source.inputs[: len(leaves)]
        # TensorFlow traces for any length after it has seen a few.
        is_open = any(
            has_rows and tensor.shape[0] is None
            for tensor, has_rows in zip(inputs, self._has_rows, strict=True)
        )
        known = Rows.unknown(rows) if is_open else Rows(rows, rows)
        self.partition = Partition(source, layouts, known)
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in inputs]
        self._run = traced(self._on_replica, input_signature=specs)

    @classmethod
    def of(cls, job: ScriptJob, source: Any, leaves: Sequence[Any]) -> LoopStep | None:
        """Return the step, or None if the function is given no batch or uses no variable."""
        inputs = source.inputs[: len(source.inputs) - len(source.captured_inputs)]
        fit = len(inputs) == len(leaves) and all(
            tensor.shape.is_compatible_with(np.shape(leaf))
            for tensor, leaf in zip(inputs, leaves, strict=True)
        )
        lengths = Counter(leaf.shape[0] for leaf in leaves if _is_array(leaf))
        rows = lengths.most_common(1)[0][0]
        if not (fit and rows and source.graph.variables):
            return None
        job.used.add(LOOP)
        return cls(job, source, leaves, rows)

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Return what the function returns for the whole batch."""
        try:
            tensors = self.backend.call(self._run, leaves)
        except tf.errors.InvalidArgumentError as error:
            if _OTHER_ROWS not in str(error):
                raise
            raise UsageError(
                "a tf.function was called with a batch that has other rows on this "
                "rank than on another",
                hint="a shuffle needs a seed (dataset.shuffle(n, seed=1)), and data must "
                "not depend on the rank",
            ) from None
        structure = self.source.graph.structured_outputs
        by_name = dict(
            zip((t.name for t in self.source.graph.outputs), tensors, strict=True)
        )
        flat = tf.nest.flatten(structure, expand_composites=True)
        found = [by_name[t.name] if tf.is_tensor(t) else t for t in flat]
        return tf.nest.pack_sequence_as(structure, found, expand_composites=True)

    def _on_replica(self, *leaves: tf.Tensor) -> list[tf.Tensor]:
        backend = self.backend
        replica = tf.cast(backend.replica(), tf.int64)
        replicas = tf.cast(backend.replica_count(), tf.int64)
        of_rows = list(itertools.compress(leaves, self._has_rows))
        total = tf.shape(of_rows[0], tf.int64)[0]
        start, stop = share(total, replica, replicas)
        arguments = [
            [leaf[start:stop] if has_rows else leaf]
            for leaf, has_rows in zip(leaves, self._has_rows, strict=True)
        ]
        own = Share.of(total, [(start, stop - start, tf.equal(replica, 0))])
        mark = _fingerprint(of_rows)
        marks = tf.one_hot(replica, backend.most_replicas, mark, tf.zeros_like(mark))
        outputs, (marks,) = self.partition.emit(
            arguments, own, BackendExchange(backend), attached=[marks]
        )
        present = marks[: tf.cast(replicas, tf.int32)]
        same = tf.reduce_all(tf.equal(present, present[0]))
        check = tf.debugging.Assert(same, [_OTHER_ROWS, total])
        with tf.control_dependencies([] if check is None else [check]):
            return [tf.identity(output[0]) for output in outputs]


def _leaves(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors among the arguments, in the order of the function's parameters."""
    given: Any = args, kwargs
    if kwargs:
        try:
            signature = inspect.signature(function.python_function)
            given = list(signature.bind(*args, **kwargs).arguments.values())
        except (TypeError, ValueError):
            pass  # the call itself says what is wrong
    flat = tf.nest.flatten(given, expand_composites=True)
    return [leaf for leaf in flat if isinstance(leaf, tf.Tensor | np.ndarray)]


def _is_array(leaf: Any) -> bool:
    """Return whether a leaf has a first axis that may be rows."""
    return bool(len(leaf.shape))


def _fingerprint(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a number that differs between batches: float64 scalar, finite.

    Other rows, or the same in another order, give another number.
    """
    total = tf.zeros([], tf.float64)
    for tensor in tensors:
        if tensor.dtype == tf.string:
            tensor = tf.strings.to_hash_bucket_fast(tensor, 2**31)
        rows = tf.shape(tensor)[0]
        values = tf.cast(tensor, tf.float64)
        values = tf.where(tf.math.is_finite(values), values, 0.5)
        places = tf.range(1, rows + 1)
        of_rows = tf.reduce_sum(values, axis=list(range(1, len(tensor.shape))))
        of_rows *= tf.cast(places, tf.float64)
        total += tf.reduce_sum(of_rows) / tf.cast(tf.maximum(rows, 1), tf.float64)
    return total
