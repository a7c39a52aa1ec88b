"""The variance over the rows of a batch, in the sum that also gives the mean.

Keras' BatchNormalization takes the mean of ``x``, and then the mean of the squares of
``x`` less that mean: two sums over the replicas, one after the other. Here each replica
sums the squares about its own mean ``m_r`` and sends, of its ``n_r`` elements of ``n``::

    n_r m_r / n        and        (sum of (x - m_r)^2 + n_r m_r^2) / n

The variance is the sum of the second less the square of that of the first. The two are
float64, so that what cancels is not seen in float32. (T. F. Chan, G. H. Golub and R. J.
LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.layouts import MOMENTS, WHOLE, Layout, Sharded
from collective.training.partition.plans import Plan, Rows, rule, summed
from collective.training.partition.sizes import product
from collective.training.partition.values import axes_in

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission


def find(graph: Graph) -> None:
    """Have each variance of a graph read what it is the variance of, and name its mean."""
    for node in graph.nodes:
        for body in node.bodies:
            find(body)
        found = _mean_of(node)
        if found is None:
            continue
        x, mean = found
        squares = node.inputs[0]
        squares.users.remove(node)
        x.users.append(node)
        node.inputs[0], node.mean = x, mean


def _mean_of(node: Node) -> tuple[Value, Value] | None:
    """Return what a node is the variance of, and its mean; None of other nodes."""
    squares = node.inputs[0].node if node.type == "Mean" else None
    if squares is None or squares.type != "SquaredDifference":
        return None
    x, about = squares.inputs
    stop = about.node
    if stop is None or stop.type != "StopGradient" or x.dtype != tf.float32:
        return None  # of float64 the two sums are more precise
    mean = stop.inputs[0]
    if mean.node is None or mean.node.type != "Mean" or mean.node.inputs[0] is not x:
        return None
    axes = [tf.get_static_value(one.inputs[1].source) for one in (mean.node, node)]
    is_same = axes[0] is not None and axes[1] is not None and (axes[0] == axes[1]).all()
    keeps = mean.node.attr("keep_dims") and node.attr("keep_dims")
    return (x, mean) if is_same and keeps else None


@rule("Variance")
def variance(node: Node, layouts: list[Layout], rows: Rows) -> Plan:
    """Compute moments of each replica where the variance is over all rows."""
    x, (layout, _) = node.inputs[0], summed(layouts)
    axes = axes_in(node.inputs[1], x.rank)

    def at_once(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        over = tf.get_static_value(node.inputs[1].source)
        return [tf.math.reduce_variance(inputs[0], over, keepdims=True)]

    if not isinstance(layout, Sharded) or x.shape is None or axes is None:
        return Plan([WHOLE, None], [WHOLE], at_once)
    if layout.axis not in axes:
        return Plan([layout, None], [layout], at_once)
    rest = [size for axis, size in enumerate(x.shape) if axis in axes]
    rest.remove(x.shape[layout.axis])
    count = product([x.shape[layout.axis], *rest])

    def moments(emission: Emission, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        values = inputs[0]
        own = product([emission.own_rows * layout.per_row, *rest])
        total = tf.reduce_sum(values, axes, keepdims=True)
        mean = tf.math.divide_no_nan(total, emission.scalar(own, x.dtype))
        around = tf.math.squared_difference(values, mean)
        squares = tf.reduce_sum(around, axes, keepdims=True)
        n, wide = emission.scalar(count, tf.float64), tf.cast(mean, tf.float64)
        share = emission.scalar(own, tf.float64) / n
        of_squares = tf.cast(squares, tf.float64) / n
        return [tf.stack([share * wide, of_squares + share * wide**2])]

    return Plan([layout, None], [MOMENTS], moments, finish=_finished)


def _finished(
    totals: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the mean and the variance, one for each device, of what was summed."""
    found = []
    for total in totals:
        with tf.device(total.device):
            mean, square = tf.unstack(total)
            spread = tf.maximum(square - mean**2, 0)
            found.append((tf.cast(mean, tf.float32), tf.cast(spread, tf.float32)))
    means, variances = zip(*found, strict=True)
    return list(means), list(variances)
