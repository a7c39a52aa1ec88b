"""A hook that leaves nothing out: with it, a training is that without a hook."""

from __future__ import annotations

import numpy as np

from collective.training.compression import CommunicationHook, Exchanged


class Everything(CommunicationHook):
    """Sends matrices as they are, in a message of their own, and counts steps."""

    def compresses(self, shape):
        return len(shape) > 1

    def start(self, shape, index):
        return [np.zeros([])]

    def exchange(self, gradients, shared, all_reduce):
        all_reduce([])
        totals = all_reduce(gradients)
        return Exchanged(totals, gradients, [[count + 1] for (count,) in shared])
