"""``collectiverun --dry-run --keras script.py``: what a step would hold and send.

The script runs up to the first training step of Keras' ``fit``. That step is traced and
made for this rank, and described; then every rank ends, and nothing was trained.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.plan import share
from collective.training.partition.explain import explained, made_by
from collective.training.partition.kept import Kept
from collective.training.sharding.held import part_of
from collective.training.steps.batch_function import BatchFunction, StepObserver
from collective.training.steps.partitioned_program import PartitionedProgram
from collective.training.steps.program import Program

# Lines for the largest values; and into how many micro-batches rows might be cut.
_LARGEST, _PIECES = 5, (1, 2, 4)


class DryRun(StepObserver):
    """Describes the first training step of a script, and ends the script before it."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def check(self, model: keras.Model, is_ours: bool) -> None:
        """Refuse a training whose step is not made from Keras' own graph.

        Args:
            is_ours: Whether ``collective.fit`` fits the model.

        Raises:
            UsageError: It would train.
        """
        if model.run_eagerly or tf.config.functions_run_eagerly():
            raise _refused(model, "it runs eagerly", "leave out run_eagerly=True")
        if is_ours:
            raise _refused(
                model, "collective.fit makes its step", "choose backend native"
            )

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """End the script before its first training step.

        Raises:
            SystemExit: With exit code 0.
        """
        if function.name != "train_step":
            return
        if not isinstance(program, PartitionedProgram):
            raise _refused(
                function.model,
                "each replica has a batch of its own",
                "drop --set per_replica",
            )
        program.trace()
        if self._backend.rank == 0:
            print(*self._lines(function, program, tensors), sep="\n", flush=True)
        self._backend.barrier()  # a rank that ends would end the others
        sys.exit(0)

    def _lines(
        self,
        function: BatchFunction,
        program: PartitionedProgram,
        tensors: Sequence[tf.Tensor],
    ) -> Iterator[str]:
        model, mesh = function.model, program.mesh
        replicas = mesh.rows.replicas  # that share the rows of a batch
        lengths = zip(tensors, program.kind.cut, strict=True)
        rows = next((len(t) for t, is_cut in lengths if is_cut), 1)
        own = max(
            stop - start
            for start, stop in (share(rows, r, replicas) for r in range(replicas))
        )
        yield f"\ndry run: {function.name} of {model.name!r}; nothing was trained"
        yield f"rows: {rows} a step, {own} on each of {replicas} replicas"
        slots = _slots(model)
        weights = _bytes(model.variables)
        whose = " of this rank" if mesh.held else ""
        yield f"weights{whose}: {_mib(weights)}; slots of the optimizer: {_mib(slots)}"
        kept = Kept(program.partition, rows, own)
        found = kept.for_backward()
        total = sum(size for _, size in found)
        yield f"kept from the forward pass for the backward pass: {_mib(total)}; the largest:"
        for value, size in found[:_LARGEST]:
            assert value.node is not None
            yield f"  {_mib(size)}: {made_by(value)} ({value.node.op.name})"
        yield from explained(program.partition, program.traffic)
        for axis, passed in mesh.passes.items():
            for line in explained(passed.partition, passed.traffic):
                yield f"along {axis!r}: {line}"
        yield from self._peaks(kept, slots, replicas)

    def _peaks(self, kept: Kept, slots: int, replicas: int) -> Iterator[str]:
        """Yield about how much memory a rank takes at most, with each option."""
        here = _resident()
        found = [f"{n}: {_mib(here + kept.peak(n))}" for n in _PIECES]
        yield f"memory of a rank, about, by accumulate: {', '.join(found)}"
        if replicas > 1 and slots:
            saved = slots - slots // replicas
            yield f"with shard_optimizer: {_mib(saved)} less"


def _slots(model: keras.Model) -> int:
    """Return the bytes of what the optimizer keeps on this rank for each weight."""
    return _bytes([v for v in model.optimizer.variables if v.shape])


def _bytes(variables: Sequence[keras.Variable]) -> int:
    """Return the bytes that this rank holds of variables."""
    found = 0
    for variable in variables:
        part = part_of(variable)
        if variable.dtype != "string":
            found += part.bytes[1] if part else keras_compat.model.bytes_of(variable)
    return found


def _resident() -> int:
    """Return the bytes of memory that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _mib(size: float) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _refused(model: keras.Model, why: str, hint: str) -> UsageError:
    return UsageError(
        f"--dry-run cannot describe the training of model {model.name!r}: {why}",
        hint=hint,
    )
