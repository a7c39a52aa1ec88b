"""Operands in any layout, and the comparison of a partitioned operation on them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.partitioned import Partitioned, assert_same, cut

BLOCKS = [(1,), (1,), (2,), (1, 1), (1, 2)]  # indices of a row in each block
# make test-gpu also tries float32, whose products are rounded by their size.
FLOAT = os.environ.get("FLOATX", "float64")
Values = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
Functions = Mapping[str, Callable[..., Any]]


def left_out(*values: Any) -> Any:
    """Return a parameter set of the matrix; ``make test`` tries others of the same rules."""
    return pytest.param(*values, marks=pytest.mark.matrix)


def generator(seed: int) -> np.random.Generator:
    """Return the generator of a test; ``SEED=1 pytest ...`` tries other draws."""
    return np.random.default_rng([int(os.environ.get("SEED", 0)), seed])


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers for which nearly all functions are defined and smooth."""
    return rng.uniform(0.2, 0.8, shape)


def signed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers of both signs."""
    return rng.normal(size=shape)


def below(most: int, dtype: str = "int32") -> Values:
    """Return a maker of whole numbers from 0 on."""
    return lambda rng, shape: rng.integers(0, most, shape).astype(dtype)


def truth(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return random booleans."""
    return rng.integers(0, 2, shape).astype(bool)


def complex_(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return complex numbers."""
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


@dataclass
class _Argument:
    shape: tuple[int, ...]  # after the rows, if it has rows
    has_rows: bool
    values: Values


class Refused(Exception):
    """Stock TensorFlow fails, too."""


class Operands:
    """Operands of the tests: tensors that are made from the arguments of a function.

    Args:
        rng: The generator of all draws.
        blocks: Indices of the sharded axis that a row has, in each of its blocks.
    """

    def __init__(self, rng: np.random.Generator, blocks: Sequence[int] = (1,)):
        self.rng, self.blocks = rng, tuple(blocks)
        self._arguments = [_Argument((), True, unit)]  # as long as the batch
        self._makers: list[Callable[[Sequence[tf.Tensor]], tf.Tensor]] = []

    @property
    def has_rows(self) -> list[bool]:
        """Return whether each argument has rows."""
        return [argument.has_rows for argument in self._arguments]

    def arrays(self, rows: int) -> list[np.ndarray]:
        """Return arguments for a batch of this length."""
        found = [
            a.values(self.rng, (rows, *a.shape) if a.has_rows else a.shape)
            for a in self._arguments
        ]
        return [a.astype(FLOAT) if a.dtype == np.float64 else a for a in found]

    def tensors(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the operands, in the graph that is being traced."""
        return [make(arguments) for make in self._makers]

    def _argument(self, shape: Sequence[int], has_rows: bool, values: Values) -> int:
        self._arguments.append(_Argument(tuple(shape), has_rows, values))
        return len(self._arguments) - 1

    def sharded(
        self, rest: Sequence[int], axis: int = 0, values: Values = signed
    ) -> Operands:
        """Add an operand with rows along an axis; ``rest`` has the sizes of the others."""
        places = [
            self._argument(rest if block == 1 else (block, *rest), True, values)
            for block in self.blocks
        ]

        def make(arguments: Sequence[tf.Tensor]) -> tf.Tensor:
            parts = [
                arguments[i] if block == 1 else tf.reshape(arguments[i], [-1, *rest])
                for i, block in zip(places, self.blocks, strict=True)
            ]
            return _moved(parts[0] if len(parts) == 1 else tf.concat(parts, 0), axis)

        self._makers.append(make)
        return self

    def counted(self, rest: Sequence[int], axis: int = 0) -> Operands:
        """Add a whole operand that is as long as the batch."""
        place = self._argument(rest, False, unit)

        def make(arguments: Sequence[tf.Tensor]) -> tf.Tensor:
            base = arguments[place]
            count = tf.shape(arguments[0])[0] * sum(self.blocks)
            steps = tf.cast(tf.range(count), base.dtype) * 0.01
            return _moved(base + tf.reshape(steps, [-1] + [1] * len(rest)), axis)

        self._makers.append(make)
        return self

    def whole(self, shape: Sequence[int], values: Values = signed) -> Operands:
        """Add an operand without rows."""
        place = self._argument(shape, False, values)
        self._makers.append(lambda arguments: arguments[place])
        return self

    def partial(self, shape: Sequence[int], values: Values = signed) -> Operands:
        """Add a sum over the rows."""
        place = self._argument(shape, True, values)
        self._makers.append(lambda arguments: tf.reduce_sum(arguments[place], 0))
        return self


def _moved(x: tf.Tensor, axis: int) -> tf.Tensor:
    order = list(range(1, x.shape.rank))
    order.insert(axis, 0)
    return tf.transpose(x, order) if axis else x


def raw(type_: str, *inputs: Any, **attributes: Any) -> Any:
    """Return the result of a type's operation on operands in their order."""
    operation = getattr(tf.raw_ops, type_)
    names = list(inspect.signature(operation).parameters)[: len(inputs)]
    return operation(**dict(zip(names, inputs, strict=True)), **attributes)


def check(
    operands: Operands,
    functions: Functions,
    *,
    derivatives: int = 0,
    tolerance: float = 1e-12,
    is_static: bool | None = None,
    most: int = 4,
) -> Partitioned:
    """Compare functions of operands, partitioned over replicas, with one process.

    Batches of several lengths, including one row, are cut at random; sometimes the
    function is traced for one length only.

    Args:
        derivatives: 1: derivatives of each result by each operand, too; 2: second ones, too.
        is_static: Whether it is traced for batches of one length; None: it is drawn.
        most: Replicas, at most.
    """
    if FLOAT == "float32" and tolerance:
        tolerance = max(tolerance, 1e-3)
    rng = operands.rng
    drawn, replicas = bool(rng.random() < 0.3), int(rng.integers(1, most + 1))
    is_static = drawn if is_static is None else is_static
    names: list[str] = []

    def traced(*arguments: tf.Tensor) -> list[tf.Tensor]:
        names.clear()
        found = _with_derivatives(functions, operands, arguments, derivatives)
        names.extend(found)
        return list(found.values())

    rows = int(rng.integers(2, 8))
    made = Partitioned(
        traced,
        operands.arrays(rows),
        operands.has_rows,
        replicas=replicas,
        is_static=is_static,
    )
    for length in [rows, rows] if is_static else [rows, 1, int(rng.integers(2, 12))]:
        arguments = operands.arrays(length)
        counts = cut(rng, length, replicas)
        try:
            want, got = _whole(made, arguments), made(counts, arguments)
            assert_same(want, got, names, tolerance)
        except Exception as error:
            error.add_note(
                f"blocks {operands.blocks}, rows {counts}, {is_static=}, of {names}"
            )
            raise
    return made


def _whole(made: Partitioned, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    try:
        return made.whole(arguments)
    except tf.errors.OpError as error:
        raise Refused(str(error)) from error


def _with_derivatives(
    functions: Functions,
    operands: Operands,
    arguments: Sequence[tf.Tensor],
    order: int,
) -> dict[str, tf.Tensor]:
    found: dict[str, tf.Tensor] = {}
    for name, function in functions.items():
        inputs = operands.tensors(arguments)  # each function has its own
        by = [x for x in inputs if x.dtype.is_floating]
        slopes: dict[int, tf.Tensor] = {}
        with tf.GradientTape() as outer:
            outer.watch(by)
            with tf.GradientTape() as inner:
                inner.watch(by)
                results = tf.nest.flatten(function(*inputs))
                floats = [y for y in results if y.dtype.is_floating and order]
                smooth = [tf.sin(y) for y in floats]
                sums = [tf.cast(tf.reduce_sum(y), tf.float64) for y in smooth]
                score = tf.add_n(sums) if sums else 0
            if smooth:
                slopes = _gradients(inner, score, by)
            bends = [tf.reduce_sum(tf.sin(g)) for g in slopes.values()]
            bend = tf.add_n(bends) if bends else None
        found |= {f"{name}:{i}": y for i, y in enumerate(results)}
        found |= {f"{name} by {i}": g for i, g in slopes.items()}
        if order > 1 and bend is not None:
            second = _gradients(outer, bend, by)
            found |= {f"{name} twice by {i}": g for i, g in second.items()}
    return found


def _gradients(
    tape: tf.GradientTape, score: tf.Tensor, by: list[tf.Tensor]
) -> dict[int, tf.Tensor]:
    try:
        found = tape.gradient(score, by)
    except LookupError:
        return {}  # it has no derivative
    return {i: tf.convert_to_tensor(g) for i, g in enumerate(found) if g is not None}
