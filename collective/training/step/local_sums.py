"""The plain local sums: micro-batches of a replica's rows, with one in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.input.pipeline import Batch
from collective.training.prepared import PreparedModel
from collective.training.step import finite
from collective.training.step.accumulation import accumulate
from collective.training.step.forward import Forward, Sums
from collective.training.step.found import Found
from collective.training.step.inputs import (
    ReplicaRows,
    StepInputs,
    replica_rows,
    weight_specs,
)
from collective.training.step.parts import ReplicaSums
from collective.training.step.passes import TracedPass
from collective.training.step.rows import Rows, rows_of
from collective.training.traced import traced

_SCALAR = tf.TensorSpec([], tf.int64)
_SCALE = tf.TensorSpec([], tf.float32)


def trace_training(
    forward: Forward, spec: Batch, jit_compile: bool = False
) -> TracedPass:
    """Traces the forward and backward pass over some rows."""
    return trace_pass(forward.train, forward.prepared, spec, jit_compile)


def trace_pass(
    run: Callable[..., tuple[Any, Found]],
    prepared: PreparedModel,
    spec: Batch,
    jit_compile: bool = False,
) -> TracedPass:
    """As ``trace_training``, for what takes the arguments of ``Forward.train``."""
    position = tf.TensorSpec([4], tf.int64)
    signature = (weight_specs(prepared), rows_of(spec), _SCALAR, _SCALE, position)
    return TracedPass(prepared.colocated(run), signature, jit_compile)


class MicroBatches:
    """Sums micro-batch by micro-batch of batches like ``spec``; see ``LocalSums``."""

    counts_replicas = False

    def __init__(
        self,
        backend: Backend,
        forward: Forward,
        spec: Batch,
        micro_batches: int,
        maybe_empty: bool,
        jit_compile: bool,
    ):
        self.prepared: PreparedModel = forward.prepared
        self.backend = backend
        self.micro_batches = micro_batches
        self.maybe_empty = maybe_empty
        self.traced = trace_training(forward, spec, jit_compile)
        inputs = StepInputs(
            *(weight_specs(self.prepared), rows_of(spec), _SCALAR, _SCALAR, _SCALE),
            *(_SCALAR, _SCALAR, _SCALAR, tf.TensorSpec([None], tf.float64)),
        )
        self.function = traced(
            self.prepared.colocated(self._add_up), input_signature=(inputs,)
        )
        self.function.get_concrete_function()

    def rows(self, batch: Batch, replica: tf.Tensor) -> ReplicaRows:
        """The rows of a replica."""
        return replica_rows(self.backend, batch, replica)

    def __call__(self, inputs: StepInputs) -> ReplicaSums:
        """Inside ``Backend.run``: the sums of this replica."""
        sums, found = self.sums(inputs), self.traced.found
        count = len(inputs.weights.trainable)
        not_finite = finite.first_of(sums, found, count)
        return ReplicaSums(sums, not_finite, found)

    def sums(self, inputs: StepInputs) -> Sums:
        """The sums over a replica's rows. Pure."""
        return self._beside_variables(self.function(inputs))

    def _add_up(self, inputs: StepInputs) -> Sums:
        def compute(micro_batch: tf.Tensor, start: tf.Tensor, rows: Rows) -> Sums:
            sums = self.traced.function(*inputs.of_pass(rows, micro_batch, start))
            return self._beside_variables(sums)

        return accumulate(
            compute,
            self.traced.shapes,
            inputs.count,
            inputs.rows,
            self.micro_batches,
            self.maybe_empty,
        )

    def _beside_variables(self, sums: Sums) -> Sums:
        """Where layers are on several devices: gradients beside their variables."""
        prepared = self.prepared
        variables = [prepared.trainable[i] for i in self.traced.found.connected]
        gradients = [prepared.beside(variables, terms) for terms in sums.gradients]
        return sums._replace(gradients=gradients)
