"""Sharded optimizer state (ZeRO stage 1): each rank keeps and updates its own part.

Every trainable variable is cut, as a flat vector, into as many parts as there are ranks;
the last one is filled up with zeros. Gradients are reduce-scattered, so that each rank
has the sums of its own parts. Keras' optimizer, built on variables of these parts, makes
of them what it would have made of them within the whole: it treats each element alone.
The norms that it clips by are those of the whole (``collective.training.memory.partitioned``). Then the weights
are all-gathered.

Source: S. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models, 2020.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends import Options
from collective.backends.base import Backend
from collective.backends.capabilities import ShardCollectives
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.memory import partitioned
from collective.training.memory.partitioned import Parted

LARGE = 1 << 16  # elements


def of(model: keras.Model) -> Sharding | None:
    """How a model's optimizer is sharded; None if it is not."""
    found = partitioned.of(model)
    return found if isinstance(found, Sharding) else None


def check(model: keras.Model, backend: Backend) -> None:
    """Refuses, before the model is built, what cannot be sharded.

    Raises:
        UsageError: For the backend, the optimizer, or one that is built already.
    """
    if len(backend.local_replicas) != 1:
        raise UsageError(
            f"backend {backend.name!r} has all replicas in one process, which shards no "
            "optimizer",
            hint=f"mpirun -np {backend.replicas} python train.py --shard-optimizer",
        )
    if not backend.synchronous:
        raise UsageError(
            f"backend {backend.name!r} has no ranks that share an update: its servers "
            "hold the optimizer's state in parts already",
            hint="drop --shard-optimizer; --parameter-servers N for more of them",
        )
    for option in ("algorithm", "transport_dtype", "bucket_bytes"):
        if getattr(backend.options, option) != getattr(Options(), option):
            raise UsageError(
                f"--{option.replace('_', '-')} is for the all-reduce of gradients, and "
                "--shard-optimizer has none",
                hint="drop one of the two",
            )
    if backend.elastic:
        raise UsageError(
            "with a rank that dies, its part of the sharded optimizer is lost",
            hint="drop --min-np and go on from a --checkpoint-dir, or drop "
            "--shard-optimizer",
        )
    if backend.tensor is not None:
        raise UsageError(
            "--shard-optimizer cuts variables that --tensor-parallel has cut already",
            hint="drop one of them",
        )
    partitioned.check_optimizer(model, "--shard-optimizer")


class Sharding(Parted):
    """A model's optimizer, of which this rank has its part.

    Args:
        model: Built and compiled, but for its optimizer, which gets built here.
        backend: One with a replica in each process.
    """

    backend: ShardCollectives

    def __init__(self, model: keras.Model, backend: Backend):
        assert isinstance(backend, ShardCollectives)
        all_gather = backend.all_gather
        super().__init__(model, backend)
        self.variables = list(model.trainable_variables)
        self.lengths = [
            -(-math.prod(v.shape) // backend.replicas) for v in self.variables
        ]
        with backend.scope():
            self.parts, slots = keras_compat.build_in_parts(
                model.optimizer, self.variables, self.lengths
            )
        self._slots = {id(v): self.variables[i] for v, i in slots}
        self._gathered = tf.function(
            lambda part: backend.run(all_gather, (part,)), autograph=False
        )

    def shape_of(self, variable: keras.Variable) -> tuple[int, ...] | None:
        """The whole shape of an optimizer's variable; None if it is not sharded."""
        whole = self._slots.get(id(variable))
        return None if whole is None else tuple(whole.shape)

    def reduce_scatter(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Inside ``run``: this rank's parts of the sums, flat, of whole gradients."""
        sums: list[Any] = [None] * len(gradients)
        for places in _together(gradients):
            rows = [self._rows(gradients[i]) for i in places]
            mine = self.backend.reduce_scatter(_concatenated(rows, axis=1))
            parts = tf.split(mine, [row.shape[1] for row in rows])
            for i, part in zip(places, parts, strict=True):
                sums[i] = part
        return sums

    def apply(self, gradients: Sequence[tf.Tensor], connected: Sequence[int]) -> None:
        """Inside ``run``: updates this rank's parts, then all weights."""
        gradients, skipped = self._look_at_all(gradients, connected)
        rank = self.backend.replica()
        self.backend.assign(
            [keras_compat.tf_variable(part) for part in self.parts],
            [self._part(tf.convert_to_tensor(v), rank) for v in self.variables],
        )
        mine = [self.parts[i] for i in connected]
        keras_compat.apply(self.optimizer, gradients, mine, self.backend.assign)
        self._gather_weights(connected, skipped)

    def finish(self) -> None:
        """What Keras does at the end of ``fit``; every rank calls it."""
        core = keras_compat.core_optimizer(self.optimizer)
        if not core.use_ema:
            return
        with self.backend.scope():
            core.finalize_variable_values(self.parts)
        run = tf.function(
            lambda: self.backend.run(self._gather_weights, ()), autograph=False
        )
        run()

    def gather(self) -> dict[int, np.ndarray]:
        """The sharded variables whole, by ``id``; every rank calls it, rank 0 gets it."""
        found = {}
        for variable in self.optimizer.variables:
            shape = self.shape_of(variable)
            if shape is None:
                continue
            rows = self._gathered(tf.convert_to_tensor(variable))
            if self.backend.rank == 0:
                found[id(variable)] = _whole(rows, shape).numpy()
        return found

    def part_of(self, variable: keras.Variable, value: np.ndarray) -> Any:
        """Of a whole value, what this rank's variable holds."""
        if self.shape_of(variable) is None:
            return value
        return self._part(tf.convert_to_tensor(value), self.backend.rank)

    def _part(self, value: tf.Tensor, rank: Any) -> tf.Tensor:
        """A row of ``_rows``, without making the others."""
        length = -(-value.shape.num_elements() // self.backend.replicas)
        mine = tf.reshape(value, [-1])[rank * length : (rank + 1) * length]
        return tf.ensure_shape(
            tf.pad(mine, [[0, length - tf.shape(mine)[0]]]), [length]
        )

    def _rows(self, value: tf.Tensor) -> tf.Tensor:
        """A tensor as ``[replicas, length]``, filled up with zeros."""
        ranks, count = self.backend.replicas, value.shape.num_elements()
        length = -(-count // ranks)
        flat = tf.pad(tf.reshape(value, [-1]), [[0, length * ranks - count]])
        return tf.reshape(flat, [ranks, length])

    def _gather_weights(
        self, constrained: Sequence[int] = (), unless: tf.Tensor | None = None
    ) -> None:
        """Inside ``run``: makes the weights of all ranks' parts.

        One group after the other, so that few are there twice at a time.
        """
        done: list[tf.Tensor] = []
        for places in _together(self.variables):
            with tf.control_dependencies(done):
                mine = [tf.convert_to_tensor(self.parts[i]) for i in places]
            rows = self.backend.all_gather(_concatenated(mine, axis=0))
            pieces = tf.split(rows, [self.lengths[i] for i in places], axis=1)
            done = [
                _whole(piece, self.variables[i].shape)
                for i, piece in zip(places, pieces, strict=True)
            ]
            for place, i in enumerate(places):
                constraint = self.variables[i].constraint
                if constraint is not None and i in constrained:
                    value = constraint(done[place])
                    if unless is not None:
                        value = tf.where(unless, done[place], value)
                    done[place] = value
            self.backend.assign(
                [keras_compat.tf_variable(self.variables[i]) for i in places], done
            )

    def _total(self, told: tf.Tensor) -> tf.Tensor:
        return self.backend.all_reduce([told])[0]


def _whole(rows: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """The inverse of ``Sharding._rows``."""
    return tf.reshape(tf.reshape(rows, [-1])[: math.prod(shape)], shape)


def _together(like: Sequence[Any]) -> list[list[int]]:
    """Places of tensors that travel together, by dtype; a large one goes alone.

    So that it need not be copied, and is not there twice with all others.
    """
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(like):
        large = math.prod(tensor.shape) >= LARGE
        groups.setdefault(i if large else tf.as_dtype(tensor.dtype), []).append(i)
    return list(groups.values())


def _concatenated(tensors: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis)
