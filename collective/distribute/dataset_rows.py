"""The rows of a data set's batches that the devices of a process read.

TensorFlow's own rule: each of N replicas gets ceil(n / N) of the n rows of a batch, in
order; the last replicas get fewer, or none. A replica without rows still gets an
(empty) batch, so all replicas take the same number of steps.

A process skips the rows of others before they are processed, if the rows of a batch can
be known before that: below the batch, under functions that draw no random numbers.
Otherwise it makes whole batches, keeps its rows, and logs that.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from collective.distribute import tf_internal
from collective.errors import UsageError
from collective.log import log

_ONE_FOR_ONE = ("Map", "Prefetch", "Options")


def own_rows(
    dataset: tf.data.Dataset, rank: int, size: int, devices: int
) -> tf.data.Dataset:
    """Return a process' rows: for each batch, successive elements for its devices.

    Args:
        dataset: Yields batches of all replicas.
        rank, size: This process, and the number of processes.
        devices: The number of devices of each process.

    Raises:
        UsageError: The elements are not batches, or each process would shuffle them in
            another order.
    """
    check_batches(dataset, size * devices)
    if size * devices == 1:
        return dataset
    first, replicas = rank * devices, size * devices
    reduced = _skip_before_batch(dataset, first, devices, replicas)
    if reduced is not None:
        return reduced
    if size > 1 and rank == 0 and _processes(dataset):
        _say_whole_batches(_first_obstacle(dataset))
    return _cut_batches(dataset, first, devices, replicas)


def dealt_out(
    dataset: tf.data.Dataset, rank: int, size: int, devices: int
) -> tf.data.Dataset:
    """Keep one process' batches of a pipeline that yields all replicas' in turn."""
    if size == 1:
        return dataset
    group = size * devices

    def is_own(index: tf.Tensor, *_: Any) -> tf.Tensor:
        return index % group // devices == rank

    return dataset.enumerate().filter(is_own).map(lambda _, element: element)


def check_batches(dataset: tf.data.Dataset, replicas: int) -> None:
    """Refuse single rows, and shuffles that differ between processes."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
            raise UsageError(
                "the data set has single rows, and batches are shared by "
                f"{replicas} replicas: Call the `batch` method on the input Dataset",
                hint="dataset.batch(GLOBAL_BATCH_SIZE)",
            )
    below = [dataset]
    while below:
        found = below.pop()
        if tf_internal.is_unseeded_shuffle(found) and replicas > 1:
            raise UsageError(
                "the data set was shuffled without a seed before the strategy was "
                "made: each rank would have another order, rows twice and never",
                hint="make the strategy first, or dataset.shuffle(n, seed=1)",
            )
        below += tf_internal.inputs_of(found)


def _share(rows: Any, replica: int, replicas: int) -> tuple[Any, Any]:
    """Return begin and end of a replica's rows."""
    each = -(-rows // replicas)
    low = tf.minimum(each * replica, rows)
    return low, tf.minimum(low + each, rows)


def _cut_batches(
    dataset: tf.data.Dataset, first: int, devices: int, replicas: int
) -> tf.data.Dataset:
    def piece(batch: tuple[Any, ...], replica: int) -> Any:
        rows, static = _count(batch)
        low, high = _share(rows, replica, replicas)
        known = None
        if static is not None:
            begin, end = _numbers(static, replica, replicas)
            known = end - begin
        parts = tf.nest.map_structure(
            lambda leaf: _slice(leaf, low, high, known), batch
        )
        return parts if len(parts) > 1 else parts[0]

    if devices == 1:
        cut = dataset.map(
            lambda *batch: piece(batch, first),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        return cut.prefetch(1)

    def pieces(*batch: Any) -> tf.data.Dataset:
        each = [piece(batch, first + device) for device in range(devices)]
        parts = [tf.data.Dataset.from_tensors(part).map(_open) for part in each]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.concatenate(part)
        return whole

    return dataset.flat_map(pieces).prefetch(devices)


def _open(*batch: Any) -> Any:
    """Return a batch of unknown length: the pieces of a flat_map must agree."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    parts = tf.nest.map_structure(one, batch)
    return parts if len(parts) > 1 else parts[0]


def _count(batch: Any) -> tuple[Any, int | None]:
    """Return the rows of a batch, as a tensor and, if known, as a number."""
    leaf = tf.nest.flatten(batch)[0]
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64), leaf.shape[0]
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0], leaf.shape[0]
    return tf.shape(leaf, tf.int64)[0], leaf.shape[0]


def _slice(leaf: Any, low: Any, high: Any, known: int | None) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        others = tf.zeros([tf.size(leaf.dense_shape) - 1], tf.int64)
        start = tf.concat([[low], others], 0)
        size = tf.concat([[high - low], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, start, size)
    part = leaf[low:high]
    if known is not None and isinstance(part, tf.Tensor):
        part = tf.ensure_shape(part, [known, *part.shape[1:]])
    return part


# --- rows that are skipped before they are processed ------------------------------------


def _processes(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline computes something that skipping rows would save."""
    kind = tf_internal.kind_of(dataset)
    return "Map" in kind or any(map(_processes, tf_internal.inputs_of(dataset)))


@functools.cache
def _say_whole_batches(obstacle: str) -> None:
    log.info(
        "every rank makes the whole batches of a data set and keeps its rows of them: "
        "before %s, it is not known which rows those are",
        obstacle,
    )


def _first_obstacle(dataset: tf.data.Dataset) -> str:
    found = dataset
    while tf_internal.kind_of(found) in ("Prefetch", "Options"):
        found = tf_internal.inputs_of(found)[0]
    return tf_internal.kind_of(found).lower() + "()"


def _skip_before_batch(
    dataset: tf.data.Dataset, first: int, devices: int, replicas: int
) -> tf.data.Dataset | None:
    """Return the process' rows of a pipeline that ends with maps and a ``batch``.

    Returns None if it does not, if a map has effects, or if the size of the last batch
    is unknown: then the rows of a replica depend on all rows that follow.
    """
    found = dataset
    while tf_internal.kind_of(found) in ("Prefetch", "Options"):
        found = tf_internal.inputs_of(found)[0]
    if tf_internal.kind_of(found) != "Batch" or devices > 1:
        return None
    batch_size = tf.get_static_value(found._batch_size)
    drops = tf.get_static_value(found._drop_remainder)
    (rows,) = tf_internal.inputs_of(found)
    maps = []
    while tf_internal.kind_of(rows) in _ONE_FOR_ONE:
        if tf_internal.kind_of(rows) == "Map":
            if not tf_internal.is_stateless_map(rows):
                return None
            maps.append(tf_internal.map_function(rows))
        (rows,) = tf_internal.inputs_of(rows)
    total = _length(rows)
    if not maps or total is None or batch_size is None:
        return None
    return _skipped(rows, maps, int(batch_size), bool(drops), total, first, replicas)


def _length(rows: tf.data.Dataset) -> int | None:
    """Return the number of rows; None if it is unknown or infinite."""
    if not tf.executing_eagerly():
        return None
    total = int(rows.cardinality())
    return total if total >= 0 else None


def _skipped(
    rows: tf.data.Dataset,
    maps: list[Any],
    batch_size: int,
    drops: bool,
    total: int,
    replica: int,
    replicas: int,
) -> tf.data.Dataset | None:
    """Return rows of one replica, mapped and batched; empty batches if it has none."""
    if total == 0:
        return None
    full, rest = divmod(total, batch_size)
    rest = 0 if drops else rest
    low, high = _numbers(batch_size, replica, replicas)
    rest_low, rest_high = _numbers(rest, replica, replicas)
    if high == low or (rest and rest_high == rest_low):
        return None  # an empty batch is easier cut from a whole one

    def is_own(index: tf.Tensor, *_: Any) -> tf.Tensor:
        place = index % batch_size
        in_rest = index >= full * batch_size
        begin = tf.where(in_rest, tf.constant(rest_low, tf.int64), low)
        end = tf.where(in_rest, tf.constant(rest_high, tf.int64), high)
        return (place >= begin) & (place < end)

    own = rows.enumerate().filter(is_own).map(lambda _, row: row)
    own = own.apply(
        tf.data.experimental.assert_cardinality(
            full * (high - low) + rest_high - rest_low
        )
    )
    for function, parallel, order in reversed(maps):
        own = own.map(function, num_parallel_calls=parallel, deterministic=order)
    if full == 0:
        return own.batch(rest_high - rest_low)
    return own.batch(high - low, drop_remainder=rest == 0).prefetch(1)


def _numbers(rows: int, replica: int, replicas: int) -> tuple[int, int]:
    each = -(-rows // replicas)
    low = min(each * replica, rows)
    return low, min(low + each, rows)
