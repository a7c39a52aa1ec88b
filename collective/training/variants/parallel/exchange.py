"""The exchange where several ranks hold one replica together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.training.step.attachments import Attachment
from collective.training.step.found import Found
from collective.training.step.parts import Span, StepSums
from collective.training.step.reduction import AllReduce


class ByRank(AllReduce):
    """An all-reduce, then what each rank of a replica has contributed.

    The all-reduce sums over replicas; ranks of one replica have different totals.

    Args:
        dtype: As for ``AllReduce``.
        group: The ranks of this replica (``Backend.tensor``).
        attachments: Of ``StepSums.attached``.
    """

    def __init__(
        self,
        backend: Backend,
        dtype: tf.DType,
        group: Any,
        attachments: Sequence[Attachment],
    ):
        super().__init__(backend, dtype)
        self.group = group
        self.attachments = attachments

    def __call__(self, local: StepSums, found: Found) -> tuple[StepSums, Span]:
        """Inside ``Backend.run``; the span is that of the all-reduce."""
        total, span = super().__call__(local, found)
        chosen = [place for place, a in enumerate(self.attachments) if a.per_rank]
        tensors = [t for place in chosen for t in total.attached[place]]
        columns = [total.not_finite[:, None], *tensors]
        by_rank = self.group.by_rank(tf.concat(columns, axis=1))
        pieces = tf.split(by_rank, [c.shape[1] for c in columns], axis=1)
        attached = list(total.attached)
        left = iter(pieces[1:])
        for place in chosen:
            attached[place] = [next(left) for _ in attached[place]]
        return total._replace(not_finite=pieces[0][:, 0], attached=attached), span
