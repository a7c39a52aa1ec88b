"""The alarm for replicas that no longer hold the same model.

Every replica applies the same update to the same values, so all hold the same bits. A
callback that changes one rank's weights, faulty memory or a layer that writes variables
breaks that, and nothing else would notice. So, every so many steps, the replicas compare
a 64-bit checksum of their parameters and optimizer state. If they differ, the ranks
exchange a checksum of each tensor, and the error names replica, tensor and step. Copies on
several devices of one process may differ by rounding; then the others become as the first.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from collective import recorder
from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.errors import CollectiveError
from collective.training.keras_compat import one_copy
from collective.training.keras_compat.traced import kept_with, traced
from collective.training.loop.observer import Observer
from collective.training.loop.position import Position
from collective.training.model.variables import replicated_variables
from collective.training.steps.batch_function import BatchFunction, StepObserver
from collective.training.steps.program import Program

# The bytes of a checksum. Each is sent as a float, which is exact even in bfloat16.
BYTES = 8
# By so many roundings of a tensor's largest element a copy in one process may differ.
_ROUNDINGS = 1024


class DesyncAlarm(Observer):
    """Compares the replicas' parameters and optimizer state: before steps, and at the end.

    The checksum is FarmHash's ``Fingerprint64`` (``tf.fingerprint``), which reads
    memory about as fast as it can be read.

    Args:
        every: Steps from one comparison to the next.
        first: The first step that may be compared.
    """

    def __init__(self, position: Position, every: int, first: int = 0):
        self.position, self.every, self.first = position, every, first
        self.backend = position.backend

    @functools.cached_property
    def variables(self) -> list[keras.Variable]:
        """Return what is compared; the model has its variables by then."""
        return replicated_variables(self.position.model)

    @functools.cached_property
    def _graphs(self) -> dict[str, Callable[[], tf.Tensor]]:
        """Return the graphs of ``_of_all``, by the name of what makes the checksums."""
        of = [self.backend, *self.variables]
        return kept_with(self.position.model, "checksums", of)

    def before_input(self, number: int) -> None:
        """Compare before each ``every``th step, step 0 included."""
        if number >= self.first and number % self.every == 0:
            self.position.unit(lambda: self.compare(number))

    def end_epochs(self) -> None:
        """Compare after the last step."""
        self.position.unit(lambda: self.compare(self.position.step))

    @staticmethod
    def is_needed(backend: Backend, every: int) -> bool:
        """Return whether other replicas at the same step exist, or may come."""
        others = max(backend.most_replicas, backend.size) > 1
        return bool(every) and backend.synchronous and others

    def _checksum(self) -> tf.Tensor:
        """Return the checksum of this replica: uint8 ``[1, BYTES]``."""
        return tf.fingerprint(tf.reshape(self._of_tensors(), [1, -1]))

    def _of_tensors(self) -> tf.Tensor:
        """Return checksums of this replica's tensors: uint8 ``[tensors, BYTES]``."""
        values = [tf.convert_to_tensor(v) for v in self.variables]
        return tf.concat([tf.fingerprint(tf.reshape(v, [1, -1])) for v in values], 0)

    def _in_own_row(self, values: tf.Tensor) -> tf.Tensor:
        """Return ``values`` in this replica's row of a new first axis, and zeros in others."""
        rows = tf.one_hot(self.backend.replica(), self.backend.most_replicas)
        return tf.tensordot(rows, tf.cast(values, tf.float32), axes=0)

    def compare(self, number: int) -> None:
        """Compare the replicas' variables before a step; every rank calls it.

        Raises:
            CollectiveError: They differ; every rank names replica, tensor and step.
        """
        backend, checksums = self.backend, self._of_replicas()
        if _are_alike(checksums):
            return
        if backend.most_replicas > backend.size:  # a process has several
            _round_alike([variable.value for variable in self.variables])
            checksums = self._of_replicas()
            if _are_alike(checksums):
                return

        paths = [v.path for v in self.variables]
        try:
            of_tensors = self._of_all(self._of_tensors)
        except tf.errors.OpError as failure:
            if not (isinstance(backend, Elastic) and backend.lost(failure)):
                raise
            of_tensors = np.zeros([len(checksums), len(paths) * BYTES])  # unknown
        of_tensors = of_tensors.reshape(len(of_tensors), -1, BYTES)
        error = self._error(checksums, of_tensors, paths, number)
        recorder.request_dump(error.message)
        raise error

    def _of_replicas(self) -> np.ndarray:
        """Return the checksum of each replica: ``[replicas, BYTES]``; every rank calls it."""
        return self._of_all(self._checksum)[: self.backend.replicas]

    def _of_all(self, checksums: Callable[[], tf.Tensor]) -> np.ndarray:
        """Return the checksums of all: ``[replicas, n * BYTES]``; every rank calls it.

        Args:
            checksums: Makes this replica's checksums, ``[n, BYTES]``, inside ``run``.
        """
        name = checksums.__name__

        def reduced() -> tf.Tensor:
            mine = tf.reshape(checksums(), [-1])
            return self.backend.all_reduce([self._in_own_row(mine)])[0]

        if name not in self._graphs:
            self._graphs[name] = traced(lambda: self.backend.run(reduced, ()))
        return self._graphs[name]().numpy()

    def _error(
        self,
        checksums: np.ndarray,
        of_tensors: np.ndarray,
        paths: Sequence[str],
        number: int,
    ) -> CollectiveError:
        rows = [row.tobytes() for row in checksums]
        (most, count), *rest = Counter(rows).most_common(2)
        majority = not rest or rest[0][1] < count
        right = rows.index(most) if majority else 0
        odd = [r for r, row in enumerate(rows) if row != rows[right]]
        differ = np.any(of_tensors[odd] != of_tensors[right], axis=(0, 2))
        tensors = [path for path, d in zip(paths, differ, strict=True) if d]
        where = repr(tensors[0]) if tensors else "a tensor that is the same again now"
        if len(tensors) > 1:
            where += f" and {len(tensors) - 1} more of {len(paths)} tensors"
        who, verb = self._named(odd), "has" if len(odd) == 1 else "have"
        what = f"{who} {verb} other values in {where} than "
        what += "the others" if majority else f"{self._named([right])}"
        if not majority:
            what += "; there is no majority, so either may be wrong"
        if number >= self.every:
            what += f". At step {number - self.every} all were the same"
        return CollectiveError(
            f"step {number}: {what}.",
            hint="look for code that changes weights on some ranks only (a callback's "
            "method of a batch), for ranks on unlike processors, and for faulty memory; "
            "--check-every 0 switches the comparison off",
        )

    def _named(self, replicas: Sequence[int]) -> str:
        kind = "rank" if self.backend.size > 1 else "replica"
        if len(replicas) == 1:
            return f"{kind} {replicas[0]}"
        *first, last = map(str, replicas)
        return f"{kind}s {', '.join(first)} and {last}"


def _are_alike(checksums: np.ndarray) -> bool:
    return bool(np.all(checksums == checksums[0]))


def _round_alike(variables: Sequence[tf.Variable]) -> None:
    """Give copies in one process the first one's values, if rounding alone parts them.

    TensorFlow optimizes a graph of several devices as a whole: it may reorder a product
    on one device and not on another.
    """
    for variable in variables:
        first, *others = (np.asarray(copy) for copy in one_copy.copies(variable))
        if not others or not variable.dtype.is_floating:
            continue
        first, *others = (value.astype("float64") for value in (first, *others))
        kind = ml_dtypes.finfo(variable.dtype.as_numpy_dtype)  # type: ignore[no-untyped-call]
        most = _ROUNDINGS * float(kind.eps)
        bound = min(most, 1e-3) * np.max(np.abs(first), initial=0)
        if all(np.all(np.abs(other - first) <= bound) for other in others):
            one_copy.follow_first([variable])


class DesyncWatch(StepObserver):
    """Compares the replicas before every so many steps of a model's training.

    Args:
        every: Steps from one comparison to the next; 0 for never.
        unit: Runs a function that all ranks call together, and repeats it if one of them
            has died.
    """

    def __init__(
        self, backend: Backend, every: int, unit: Callable[[Callable[[], Any]], Any]
    ):
        self._backend, self._every, self._unit = backend, every, unit
        self._steps: WeakKeyDictionary[BatchFunction, int] = WeakKeyDictionary()

    def before_step(
        self, function: BatchFunction, program: Program, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Compare the replicas if it is due."""
        if not self._every or function.name != "train_step":
            return
        number = self._steps.get(function, 0)
        self._steps[function] = number + 1
        if number and number % self._every == 0:
            place = SimpleNamespace(model=function.model, backend=self._backend)
            alarm = DesyncAlarm(place, self._every)  # type: ignore[arg-type]
            self._unit(lambda: alarm.compare(number))
