"""Runs a function on the only device of a process, in the caller's thread.

TensorFlow starts a thread for each device, which forbids collectives inside ``tf.cond``
and loops. One replica needs no thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.distribute import tf_internal


class OneReplicaCalls:
    """Calls functions as the one replica of this process."""

    def __init__(self, extended: tf.distribute.StrategyExtended):
        self._extended = extended
        # For each tf.function, the one that is traced inside the replica: a trace from
        # outside contains no collectives.
        self._traced_inside: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function; return the results as values of replicas."""
        if isinstance(function, tf_internal.Function):
            inside = self._traced_inside.get(function)
            if inside is None:
                original = function.python_function

                def in_replica(*args: Any, **kwargs: Any) -> Any:
                    return self._call(original, args, kwargs)

                inside = tf_internal.copy_function(function, in_replica)
                self._traced_inside[function] = inside
            return inside(*args, **kwargs)
        return self._call(function, args, kwargs)

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        extended = self._extended
        if not tf.executing_eagerly():
            status = tf_internal.control_status_ctx()
            function = tf_internal.tf_convert(function, status)
        args = tf_internal.select_replica(0, args)
        kwargs = tf_internal.select_replica(0, kwargs)
        context = ReplicaContext(
            extended._container_strategy(), extended._get_replica_id_in_sync_group(0)
        )
        with tf.device(extended.worker_devices[0]), context:
            result = function(*args, **kwargs)
        return tf_internal.regroup((result,))


class ReplicaContext(tf.distribute.ReplicaContext):
    """``tf.distribute.get_replica_context()`` inside the replica."""

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args = tf_internal.regroup((tuple(args),))
        kwargs = tf_internal.regroup((dict(kwargs),))
        merged = super()._merge_call(merge_fn, args, kwargs)
        return tf_internal.select_replica(0, merged)

    @property
    def devices(self) -> Any:
        """Return the device of this replica."""
        return self._strategy.extended.worker_devices
