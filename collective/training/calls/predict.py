"""``collective.predict``, what ``model.predict`` is to Keras.

Every replica computes its share of each batch. What it has computed is sent to all other
ranks once, at the end: nothing is padded, and rows come in the order of the data.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.distribute.scoped_models import backend_for
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.calls import by_keras, keras_call
from collective.training.calls.evaluate import (
    agreed_methods,
    shown,
    use_weights_of_rank_zero,
)
from collective.training.calls.opening import open_backend, open_inputs
from collective.training.input.batches import Batches
from collective.training.input.data import as_data
from collective.training.input.feed import ENDLESS
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.input.pipeline import Batch, Input
from collective.training.input.plan import share
from collective.training.keras_compat.traced import traced
from collective.training.loop.batch_methods import BatchMethods
from collective.training.loop.callbacks import CallbackMethods, Callbacks
from collective.training.model.prepared import get_prepared
from collective.training.parallel import equal
from collective.training.partition import devices
from collective.training.partition.method import PartitionedMethod
from collective.training.preparation.prepare import runs_eagerly
from collective.training.process import interrupts
from collective.training.process.failure import guarded
from collective.training.process.known_arguments import known_arguments
from collective.training.process.object_collectives import broadcast_object, gather_few
from collective.training.step.rows import without_none, zeros
from collective.training.steps.whole_step import WholePrediction
from collective.training.verification import compare_settings


@known_arguments
def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Callbacks = None,
    *,
    backend: str | Backend = "auto",
) -> Any:
    """Return the outputs of a model for all rows of x, computed by all ranks together.

    Every rank calls it with the same data, and gets all outputs, in the order of the
    data; they are those of rank 0's weights. The arguments up to ``callbacks`` are those
    of ``keras.Model.predict``.

    Args:
        model: A model; it need not be compiled.
        x: Inputs, as for ``collective.fit``.
        batch_size: Rows that are computed at a time, over all replicas; 32 by default.
        verbose: 0 silent, 1 a bar, 2 a line, ``auto``.
        steps: How many batches, at most.
        callbacks: Their ``on_predict_*`` methods are called, on rank 0. With
            ``on_predict_batch_end`` the outputs are exchanged after each batch, which
            takes longer.
        backend: A name or a backend.

    Returns:
        A NumPy array ``[rows, ...]``, a RaggedTensor, or a tree of these.

    Raises:
        UsageError: These are not data, or there are not rows; or an output of the model
            has not one entry for each row.
    """
    backend = open_backend(backend_for(model, backend))
    if by_keras.serves(model, x, backend):
        arguments = {
            "x": x,
            "batch_size": batch_size,
            "verbose": verbose,
            "steps": steps,
        }
        return keras_call.call("predict", model, arguments, callbacks, backend)
    with guarded(backend):
        compare_settings(backend)
        inputs = open_inputs(as_data(x), backend, batch_size, steps)
        steps = min(steps or ENDLESS, inputs.steps_per_epoch or ENDLESS)
        prediction = _Prediction(model, backend, inputs, steps)
        batches = None if steps == ENDLESS else steps
        methods = agreed_methods(callbacks, model, backend, verbose, batches)
        with shown(methods):
            with (
                recorder.span(recorder.OTHER, "prediction"),
                interrupts.between_steps(),
            ):
                outputs = prediction.run(methods)
            methods.share_state()
        return outputs


class _Prediction:
    """One pass over the data; at most ``steps`` batches."""

    def __init__(
        self, model: keras.Model, backend: Backend, inputs: Input | Batches, steps: int
    ):
        self.model, self.backend = model, backend
        self.inputs, self.steps = inputs, steps
        self.spec = without_none(inputs.spec)
        self._predictor = _predictor(model, backend, self.spec)
        # Which replicas each rank has; several ranks may hold one together.
        own = [backend.local_replicas[0], backend.local_replicas[-1]]
        held = gather_few(backend, own).astype(int).tolist()
        firsts = {
            tuple(replicas): rank for rank, replicas in reversed([*enumerate(held)])
        }
        self._holders = sorted((*replicas, rank) for replicas, rank in firsts.items())

    def run(self, methods: CallbackMethods) -> Any:
        """Return all outputs, on every rank."""
        model, batch_methods = self.model, BatchMethods(methods, "predict")
        self._build()
        model.stop_predicting = False
        methods.call("on_predict_begin", (), {})
        at_once = "on_predict_batch_end" in methods.used
        outputs: list[Any] = []  # of all ranks
        parts: list[Any] = []  # of this rank, for batches that are not in ``outputs``
        sizes: list[int] = []

        def exchange() -> Any:
            batches = zip(parts, sizes, strict=True)
            differ = gather_few(self.backend, [float(_differ(parts))]).any()
            outputs.extend(
                [self._exchange([part], [size]) for part, size in batches]
                if differ
                else [self._exchange(parts, sizes)]
            )
            parts.clear()
            sizes.clear()
            return outputs[-1]

        for number, batch in enumerate(self._batches()):
            interrupts.check()
            batch_methods.before(number)
            sizes.append(int(batch.global_rows))
            parts.append(self._outputs(batch))
            if batch_methods.ends(number, number + 1 == self.steps):
                together = exchange() if at_once else None
                batch_methods.after(functools.partial(dict, outputs=together))
                if model.stop_predicting:
                    break
        if parts:
            together = exchange()
            if at_once:
                batch_methods.after(functools.partial(dict, outputs=together))
        if not outputs:
            raise UsageError(
                "there are not rows to predict", hint="pass data with at least one row"
            )
        methods.call("on_predict_end", (), {})
        return keras.tree.map_structure(_writable, _concatenate(outputs))

    def _batches(self) -> Iterator[Batch]:
        if isinstance(self.inputs, Batches):
            self.inputs.reset()
            return self.inputs.epoch(self.steps)
        replicas = self.backend.local_replicas, self.backend.replicas
        return self.inputs.read_ahead(0, self.steps, *replicas)

    def _build(self) -> None:
        """Make the model's variables, and have all ranks use rank 0's."""
        if not self.model.built:
            with self.backend.scope(), keras_compat.undone_writes.undo_writes():
                self.model(zeros(self.inputs.spec).x)
        use_weights_of_rank_zero(self.model, self.backend)

    def _outputs(self, batch: Batch) -> Any:
        """Return the outputs for this process's rows as arrays, or None if it has no rows."""
        with runs_eagerly(self.model):
            outputs = self._predictor(without_none(batch))
        count = int(count_rows(first_leaf(batch.x)))
        return keras.tree.map_structure(_array, outputs) if count else None

    def _exchange(self, parts: list[Any], sizes: list[int]) -> Any:
        """Return the outputs of all ranks for successive batches, in the order of rows.

        Args:
            parts: This rank's outputs for each batch, or None if it has no rows.
            sizes: Rows of each batch, over all ranks.
        """
        found = [part for part in parts if part is not None]
        mine = _concatenate(found) if found else None
        if len(self._holders) == 1 and self.backend.size == 1:
            return mine
        own = sum(self._share(size, self.backend.local_replicas) for size in sizes)
        self._check_rows(mine, own)
        has = gather_few(self.backend, [float(mine is not None)])[:, 0]
        everything = [
            broadcast_object(self.backend, mine, rank) if has[rank] else None
            for *_, rank in self._holders
        ]
        read = [0] * len(everything)
        pieces = []
        for size in sizes:
            for place, (low, high, _) in enumerate(self._holders):
                count = self._share(size, range(low, high + 1))
                start, read[place] = read[place], read[place] + count
                if count:
                    pieces.append(_rows(everything[place], start, read[place]))
        return _concatenate(pieces)

    def _share(self, size: int, replicas: range) -> int:
        """Return how many rows of a batch these replicas have."""
        start, _ = share(size, replicas[0], self.backend.replicas)
        _, stop = share(size, replicas[-1], self.backend.replicas)
        return int(stop - start)

    def _check_rows(self, outputs: Any, rows: int) -> None:
        for leaf in [] if outputs is None else keras.tree.flatten(outputs):
            if len(leaf.shape) == 0 or leaf.shape[0] != rows:
                raise UsageError(
                    f"rank {self.backend.rank}: an output of model {self.model.name!r} "
                    f"has shape {tuple(leaf.shape)} for {rows} rows; only outputs with "
                    "an entry for each row can be computed by several ranks",
                    hint="call model.predict on one rank",
                    everywhere=False,
                )


# By model, so that the next call does not trace again.
_predictors: WeakKeyDictionary[keras.Model, dict[Any, Any]] = WeakKeyDictionary()


def _predictor(model: keras.Model, backend: Backend, spec: Batch) -> Any:
    """Return what predicts a kind of batch: from a ``Batch`` to the outputs for its rows."""
    optimizer = getattr(model, "optimizer", None)  # compile() makes another
    key = backend, repr(spec), optimizer, model.run_eagerly
    of_model = _predictors.setdefault(model, {})
    if key not in of_model:
        of_model[key] = _partitioned(model, backend, spec)
    return of_model[key]


def _partitioned(model: keras.Model, backend: Backend, spec: Batch) -> Any:
    """Keras' own ``predict_step`` for the rows of this process."""
    found = weakref.ref(model)  # else the entry would keep the model alive
    method: list[PartitionedMethod] = []

    def step(*parts: Any) -> Any:
        kept = found()
        assert kept is not None
        with get_prepared(kept).placed():
            return kept.predict_step(_present(parts))

    if model.run_eagerly:
        return WholePrediction(step, backend, spec)

    def compute(batch: Batch) -> Any:
        if not method:
            with tf.init_scope():
                around = devices.on_first(found(), backend)
                method.append(PartitionedMethod(step, spec, tracing=around))
            if backend.tensor is not None:
                prepared = get_prepared(found())
                equal.check(method[0].partition, "predict_step", prepared)
        replica, own = devices.rows_of_process(backend, batch)
        exchange = devices.exchange_of(backend)
        return method[0].rows(own, batch.global_rows, replica, exchange)

    return traced(compute, input_signature=(spec,))


def _present(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop the parts that the batch does not have."""
    return tuple(p for p in parts if not (isinstance(p, tuple) and not p))


def _array(output: Any) -> Any:
    """Copy an output to memory: a RaggedTensor stays one, others become NumPy arrays."""
    return output if isinstance(output, tf.RaggedTensor) else np.asarray(output)


def _writable(output: Any) -> Any:
    """Return the output as an array that the caller may write into, as Keras' own is."""
    if isinstance(output, tf.RaggedTensor):
        return output
    return output if output.flags.writeable else output.copy()


def _concatenate(trees: list[Any]) -> Any:
    """Join the trees row by row; ragged as Keras does it if shapes differ."""

    def one(*leaves: Any) -> Any:
        if isinstance(leaves[0], tf.RaggedTensor):
            return tf.concat(leaves, axis=0)
        if _shapes_differ(*leaves):
            return keras_compat.data.joined_outputs(
                [tf.constant(leaf) for leaf in leaves]
            )
        return leaves[0] if len(leaves) == 1 else np.concatenate(leaves)

    return keras.tree.map_structure(one, *trees)


def _shapes_differ(*leaves: Any) -> bool:
    """Return whether batches have rows of other shapes, as texts of other lengths."""
    return len({leaf.shape[1:] for leaf in leaves if isinstance(leaf, np.ndarray)}) > 1


def _differ(parts: list[Any]) -> bool:
    """Return whether any leaf of the trees differs so; None stands for no rows."""
    trees = [part for part in parts if part is not None]
    if not trees:
        return False
    return any(keras.tree.flatten(keras.tree.map_structure(_shapes_differ, *trees)))


def _rows(tree: Any, start: int, stop: int) -> Any:
    return keras.tree.map_structure(lambda leaf: leaf[start:stop], tree)
