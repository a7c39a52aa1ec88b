"""Who is who in a job, as programs ask ``strategy.cluster_resolver``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collective.backends.base import Backend


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
    """The ranks as workers. No server listens at their addresses, which are names."""

    task_type: Any = None  # plain attributes in the place of the base's properties
    task_id: Any = None

    def __init__(self, backend: Backend):
        self.task_type, self.task_id = "worker", backend.rank
        self._size = backend.size

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """All ranks, as ``rank0:0``, ..."""
        names = [f"rank{rank}:0" for rank in range(self._size)]
        return tf.train.ClusterSpec({"worker": names})

    def master(self, *_: Any, **__: Any) -> str:
        """Of no session: empty."""
        return ""

    @property
    def environment(self) -> str:
        """Of none that TensorFlow knows: empty."""
        return ""

    def num_accelerators(self, *_: Any, **__: Any) -> dict[str, int]:
        """The GPUs of this process."""
        gpus = len(tf.config.list_logical_devices("GPU"))
        return {"GPU": gpus} if gpus else {}
