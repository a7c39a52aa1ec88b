"""Batch normalization with the statistics of the whole global batch.

Each replica computes count, mean and sum of squared distances of its own rows; one
all-reduce gathers those of all, and they are combined [Chan, Golub, LeVeque, The American
Statistician 37(3), 1983]: no square of a mean is taken from a mean of squares. The
gradient needs one all-reduce more, of two numbers for each channel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from collective.backends.base import Backend
from collective.log import log
from collective.training import compatibility, keras_compat
from collective.training.prepared import PreparedModel
from collective.training.variants.coupled.replica import ReplicaContext, current

_CUT = {"virtual_replicas", "accumulate"}  # one replica has parts of a batch, too


def chosen(
    wanted: bool | str,
    prepared: PreparedModel,
    backend: Backend,
    features: Collection[str],
) -> bool:
    """Whether to synchronize every layer of a model; rank 0 says what ``auto`` costs.

    Args:
        wanted: ``sync_batch_norm`` of ``fit``; ``auto`` synchronizes where that is
            possible.
        features: Of the training, by their names in the table of compatibility.
    """
    layers = keras_compat.batch_norm_layers(prepared.model)
    layers = [layer for layer in layers if layer.trainable]
    if wanted != "auto" or not layers:
        return wanted is True
    if backend.most_replicas == 1 and not _CUT & set(features):
        return False
    possible = compatibility.works({"sync_batch_norm", *features}, backend)
    if backend.rank == 0 and not possible:
        log.warning(
            "batch normalization (%r) has the statistics of each %s rows here, "
            "and so trains another model than one process",
            layers[0].name,
            "micro-batch'" if "accumulate" in features else "replica's",
        )
    elif backend.rank == 0:
        channels = sum(
            int(layer.moving_mean.shape[0]) for layer in layers if layer.built
        )
        log.info(
            "batch normalization has the statistics of the whole batch: %d more sums "
            "over ranks a step, of %.3g KiB (sync_batch_norm=False: of each rank's rows)",
            2 * len(layers),
            channels * (2 * backend.replicas + 2) * 4 / 1024,
        )
    return possible


def synchronized(every_layer: bool) -> contextlib.AbstractContextManager[None]:
    """Around the tracing of a step: layers sum their statistics over replicas."""
    return keras_compat.replace_moments(_moments, every_layer)


def _moments(
    inputs: tf.Tensor, axes: list[int], mask: Any
) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Mean and variance over all replicas; None outside of a replica's pass."""
    context = current()
    if context is None:
        return None
    if mask is None:
        count, mean, variance = moments(inputs, None, axes, context)
        return mean, variance
    present = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
    count, mean, variance = moments(inputs, present, axes, context)
    return keras_compat.masked_moments(count, mean, variance)


def moments(
    inputs: tf.Tensor,
    present: tf.Tensor | None,
    axes: list[int],
    context: ReplicaContext,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Statistics of each channel over the rows of all replicas. Differentiable.

    Args:
        inputs: ``[n, ..., channels, ...]``, floating.
        present: Of the same shape, bool: what counts. None: everything.

    Returns:
        Scalar count of the inputs of one channel; mean and variance ``[channels]``.
    """
    weights = None if present is None else tf.cast(present, inputs.dtype)

    @tf.custom_gradient
    def combined(inputs: tf.Tensor) -> Any:
        own = context.own(_own_statistics(inputs, present, axes))
        count, mean, variance = _combined(own, context)

        def gradient(
            _: tf.Tensor, of_mean: tf.Tensor, of_variance: tf.Tensor
        ) -> tf.Tensor:
            own = context.of_whole(context.own(tf.stack([of_mean, of_variance])))
            both = context.all_reduce([own])[0]
            shares = tf.unstack(tf.math.divide_no_nan(both, count), axis=0)
            of_mean, of_variance = (_broadcast(s, inputs, axes) for s in shares)
            distance = inputs - _broadcast(mean, inputs, axes)
            result = context.of_part(of_mean + 2 * distance * of_variance)
            return context.own(result if weights is None else result * weights)

        return (count, mean, variance), gradient

    return combined(inputs)


def _own_statistics(
    inputs: tf.Tensor, present: tf.Tensor | None, axes: list[int]
) -> tf.Tensor:
    """``[1 + 2 channels]``: count, means, sums of squared distances of this replica."""
    dtype = inputs.dtype
    if present is None:
        sizes = tf.gather(tf.shape(inputs), axes)
        count = tf.cast(tf.reduce_prod(sizes), dtype)
        total = tf.reduce_sum(inputs, axes)
    else:
        # The count is that of every channel: masks do not differ between them.
        count = tf.reduce_max(tf.reduce_sum(tf.cast(present, dtype), axes))
        total = tf.reduce_sum(tf.where(present, inputs, 0), axes)
    mean = tf.math.divide_no_nan(total, count)
    squares = tf.square(inputs - _broadcast(mean, inputs, axes))
    if present is not None:
        squares = tf.where(present, squares, 0)
    return tf.concat([count[None], mean, tf.reduce_sum(squares, axes)], axis=0)


def _combined(
    own: tf.Tensor, context: ReplicaContext
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Scalar count, and mean and variance of each channel, over all replicas."""
    place = tf.one_hot(context.number, context.replicas, dtype=own.dtype)
    # tf.where: a statistic that is not a number stays in its place.
    lines = tf.where(place[:, None] > 0, own[None], tf.zeros_like(own)[None])
    lines.set_shape([context.replicas, own.shape[0]])
    everyone = context.all_reduce([lines])[0]
    channels = own.shape[0] // 2
    counts, means, squares = tf.split(everyone, [1, channels, channels], axis=1)
    count = tf.reduce_sum(counts)
    shares = tf.math.divide_no_nan(counts, count)
    mean = tf.reduce_sum(shares * means, axis=0)
    between = tf.reduce_sum(shares * tf.square(means - mean), axis=0)
    within = tf.math.divide_no_nan(tf.reduce_sum(squares, axis=0), count)
    return count, mean, within + between


def _broadcast(values: tf.Tensor, like: tf.Tensor, axes: list[int]) -> tf.Tensor:
    """Values of each channel with the rank of the inputs."""
    shape = [1 if axis in axes else -1 for axis in range(like.shape.rank)]
    return tf.reshape(values, shape)
