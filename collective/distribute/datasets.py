"""Distributed data sets, made by TensorFlow from the rows of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from collective.distribute import dataset_rows, tf_internal
from collective.training.input.distributed_datasets import note_original

_Policy = tf.data.experimental.AutoShardPolicy


def distribute_dataset(
    extended: tf.distribute.StrategyExtended, dataset: Any, options: Any
) -> Any:
    """Do ``strategy.experimental_distribute_dataset``."""
    _refuse_per_replica(options)
    if isinstance(dataset, tf.distribute.DistributedDataset):
        return dataset
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (_Policy.OFF, _Policy.FILE, _Policy.HINT):
        return _as_tensorflow(extended, dataset, options)
    backend, devices = extended.backend, len(extended.worker_devices)
    mine = dataset_rows.own_rows(dataset, backend.rank, backend.size, devices)
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = _Policy.OFF
    result = tf_internal.get_distributed_dataset(
        mine.with_options(off),
        extended._input_workers_with_options(options),
        extended._container_strategy(),
        options=options,
    )
    # All replicas end at the same step: next() need not ask the others.
    result._enable_get_next_as_optional = False
    note_original(result, dataset)
    return result


def _as_tensorflow(
    extended: tf.distribute.StrategyExtended, dataset: tf.data.Dataset, options: Any
) -> Any:
    """Distribute by OFF (each rank reads all of its data) or FILE (ranks divide files).

    Batches have a replica's size; ranks may end at different steps, and those without
    rows get empty batches.
    """
    dataset_rows.check_batches(dataset, 1)
    return tf_internal.get_distributed_dataset(
        dataset,
        extended._input_workers_with_options(options),
        extended._container_strategy(),
        num_replicas_in_sync=extended._num_replicas_in_sync,
        input_context=_context(extended, False),
        options=options,
    )


def from_function(
    extended: tf.distribute.StrategyExtended,
    make: Callable[..., Any],
    options: Any,
    one_host: bool,
) -> Any:
    """Do ``strategy.distribute_datasets_from_function``.

    Args:
        one_host: The function is written for one pipeline, whose elements the replicas
            of one host share: the ranks divide them. Otherwise each rank has a
            pipeline.
    """
    _refuse_per_replica(options)
    backend, devices = extended.backend, len(extended.worker_devices)

    def dealt(context: Any) -> tf.data.Dataset:
        dataset = make(context)
        return dataset_rows.dealt_out(dataset, backend.rank, backend.size, devices)

    return tf_internal.get_distributed_datasets_from_function(
        dealt if one_host else make,
        extended._input_workers_with_options(options),
        [_context(extended, one_host)],
        extended._container_strategy(),
        options=options,
    )


def _context(
    extended: tf.distribute.StrategyExtended, one_host: bool
) -> tf.distribute.InputContext:
    backend = extended.backend
    pipelines, number = (1, 0) if one_host else (backend.size, backend.rank)
    return tf.distribute.InputContext(pipelines, number, extended._num_replicas_in_sync)


def _refuse_per_replica(options: Any) -> None:
    per_replica = tf.distribute.InputReplicationMode.PER_REPLICA
    if options and options.experimental_replication_mode == per_replica:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is not supported: a rank has one pipeline "
            "for all of its devices\nHINT: InputReplicationMode.PER_WORKER"
        )
