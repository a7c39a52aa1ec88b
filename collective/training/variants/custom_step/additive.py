"""Which numbers of a step are sums over rows, where most are means.

The step of a replica with a share s_r of the rows computes a mean over them as a rule, and
the mean of the global batch is sum_r s_r mean_r. The gradient of a vector of losses (as
Siamese networks and masked language models take it), a loss that is summed by hand, or a
counter of rows is a sum: that of the global batch is sum_r sum_r, without s_r. The code
does not say which it is. The check does: it knows the number of the whole batch, and which
of the two sums it is.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.training import keras_compat
from collective.training.exchange import total
from collective.training.step.report import cut
from collective.training.variants.custom_step.share import Share

#: What kind of number it is; which one of its kind, in the order of the program, or by name.
Key: TypeAlias = "tuple[str, int | str]"
Recorded: TypeAlias = "dict[Key, list[np.ndarray]]"
_CLOSE = 1e-3


class Additive:
    """The numbers of a step that are sums over rows."""

    def __init__(self) -> None:
        self.found: set[Key] = set()  # their keys
        # How many numbers of each kind the last run had.
        self.counts: Counter[str] = Counter()
        # means, totals: what ``record`` notes, where they are not None: of each number
        # the sums, with shares and without; over replicas after ``sum_over``.
        self.means: Recorded | None = None
        self.totals: Recorded | None = None

    def begin(self) -> Additive:
        """Before a replica runs the step: the numbers, with the counts of this run."""
        run = copy.copy(self)
        run.counts = self.counts = Counter()
        return run

    def next(self, kind: str) -> Key:
        """The key of the next number of a kind."""
        self.counts[kind] += 1
        return kind, self.counts[kind] - 1

    def weighed(
        self, key: Key | None, share: Share, tensor: Any, dtype: Any = None
    ) -> tf.Tensor:
        """What a replica adds to the sum over replicas."""
        if key in self.found:
            return share.if_any(tf.cast(tensor, dtype or tensor.dtype))
        return share.of(tensor, dtype)

    def record(self, key: Key | None, share: Share, tensors: Sequence[Any]) -> None:
        """Notes what these rows add to the sums of a number, if wanted."""
        if key is None or self.means is None or self.totals is None:
            return
        wide = [tf.cast(t, tf.float64) for t in tensors]
        for kind, weighed in ((self.means, share.of), (self.totals, share.if_any)):
            before = kind.get(key, [0.0] * len(wide))  # those of earlier micro-batches
            kind[key] = [
                old + np.array(weighed(new))
                for old, new in zip(before, wide, strict=True)
            ]

    def sum_over(self, backend: Backend) -> None:
        """Sums what was noted over the replicas; every one calls it."""
        add_up = total(backend)
        for kind in (self.means, self.totals):
            assert kind is not None
            arrays = [array for values in kind.values() for array in values]
            flat = add_up(np.concatenate([np.zeros(0), *map(np.ravel, arrays)]))
            sums = iter(cut(flat, [array.shape for array in arrays]))
            for key, values in kind.items():
                kind[key] = [next(sums) for _ in values]

    def among(self, whole: Recorded) -> Iterator[Key]:
        """Those of the numbers of a whole batch that are sums, and not means."""
        assert self.means is not None and self.totals is not None
        for key, values in whole.items():
            if key in self.totals and key not in self.found:
                is_sum = _alike(values, self.totals[key])
                if is_sum and not _alike(values, self.means[key]):
                    yield key

    def __str__(self) -> str:
        names = {"gradient": "gradients", "scalar": "numbers of metrics"}
        return ", ".join(
            f"{names.get(kind, kind)} {place}"
            for kind, place in sorted(self.found, key=str)
        )


class NotingHooks(keras_compat.Hooks):
    """Notes the numbers of a step as they are."""

    def __init__(self) -> None:
        self._keys = Additive()
        self.noted: Recorded = {}  # by their keys; gradients dense
        self.counts = self._keys.counts  # as of ``Additive``

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Notes them."""
        key = self._keys.next("gradient")
        self.noted[key] = [np.array(tf.convert_to_tensor(g)) for g in gradients]
        return gradients

    def on_scalar(self, value: Any, weight: Any) -> tuple[Any, Any]:
        """Notes it."""
        self.noted[self._keys.next("scalar")] = [np.array(value)]
        return value, weight


def _alike(values: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all are equal, but for rounding that no share of rows is as small as."""
    if len(values) != len(others):
        return False
    pairs = [
        (np.asarray(a), np.asarray(b)) for a, b in zip(values, others, strict=True)
    ]
    if any(a.shape != b.shape for a, b in pairs):
        return False
    size = sum(np.linalg.norm(a) ** 2 for a, _ in pairs) ** 0.5
    apart = sum(np.linalg.norm(a - b) ** 2 for a, b in pairs) ** 0.5
    return bool(apart <= _CLOSE * size)
