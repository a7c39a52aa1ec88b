"""Groups of ranks, and a mesh of them, on the ranks of a launch; see test_equivalence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from collective.training.partition.backend_exchange import BackendExchange
from collective.training.partition.emission import Traffic
from collective.training.partition.layouts import ROWS, WHOLE
from collective.training.partition.mesh.axis import AxisPass
from collective.training.partition.mesh.ranks import groups_along
from collective.training.partition.partition import Partition, Placed
from collective.training.partition.plans import Rows
from collective.training.partition.shares import Share
from tests.training.partition.meshed import Weight, assert_close, piece


def check_group(backend: Any, groups: Sequence[Sequence[int]]) -> None:
    """Each rank has other data; a group must know nothing of the others."""
    group = backend.among(groups)
    members = next(list(ranks) for ranks in groups if backend.rank in ranks)
    assert (group.size, members[group.rank]) == (len(members), backend.rank)
    rank, size = backend.rank, group.size

    @tf.function(autograph=False)
    def exchanged() -> Any:
        def step() -> Any:
            numbers = tf.range(size * 3, dtype=tf.float64)
            rows = tf.reshape(numbers, [size, 3]) * (rank + 1)
            (total,) = group.all_reduce([tf.constant([rank + 1.0, rank * 10.0])])
            with tf.control_dependencies([total]):
                gathered = group.gather_rows(tf.fill([rank + 1, 2], rank))
            with tf.control_dependencies([gathered]):
                own = group.reduce_scatter(rows)
            with tf.control_dependencies([own]):
                every = group.all_gather(tf.fill([2], tf.constant(rank, tf.int64)))
            return total, gathered, own, every

        return group.run(step, ())

    total, gathered, own, every = group.call(exchanged, ())
    weights = sum(member + 1 for member in members)
    np.testing.assert_array_equal(total, [weights, 10.0 * sum(members)])
    np.testing.assert_array_equal(
        gathered, np.concatenate([np.full((m + 1, 2), m) for m in members])
    )
    np.testing.assert_array_equal(own, (np.arange(3.0) + 3 * group.rank) * weights)
    np.testing.assert_array_equal(every, [[m, m] for m in members])
    for root, member in enumerate(members):
        np.testing.assert_array_equal(
            group.broadcast_array(np.array([rank, 7]), root), [member, 7]
        )
    group.barrier()


def check_mesh(backend: Any, replicas: int, places: int) -> None:
    """A loop over units, classes, an update with a norm: equal to one process."""
    sizes = {"batch": replicas, "model": places}
    rng, units, classes = np.random.default_rng(0), 2 * places, 3 * places
    weights = [
        Weight(rng.normal(size=(2, 2 * units)), 1, 2),
        Weight(rng.normal(size=(units, 2 * units)), 1, 2),
        Weight(rng.normal(size=(units, classes)), 1),
        Weight(rng.normal(size=units)),
    ]
    variables = [tf.Variable(weight.value) for weight in weights]

    def step(x: tf.Tensor, labels: tf.Tensor) -> Any:
        kernel, recurrent, head, begin = variables
        with tf.GradientTape() as tape:
            h = tf.zeros([tf.shape(x)[0], units], x.dtype) + begin

            def cell(t: Any, h: Any) -> Any:
                a, b = tf.split(x[:, t] @ kernel + h @ recurrent, 2, 1)
                return t + 1, tf.tanh(a) * tf.sigmoid(b) + h

            _, h = tf.while_loop(lambda t, _: t < 3, cell, [0, h])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, h @ head)
            loss = tf.reduce_mean(losses)
        slopes = tape.gradient(loss, variables)
        norm = tf.linalg.global_norm(slopes)
        for variable, slope in zip(variables, slopes, strict=True):
            variable.assign_sub(slope / norm)
        return [loss, norm]

    specs = [tf.TensorSpec([None, 3, 2], tf.float64), tf.TensorSpec([None], tf.int32)]
    stock = tf.function(step, autograph=False).get_concrete_function(*specs)
    replica, place = divmod(backend.rank, places)
    mine, placed = [], {}
    for weight, variable in zip(weights, variables, strict=True):
        is_cut = weight.axis is not None and places > 1
        layout: Any = weight.layout(places) if is_cut else WHOLE
        value = piece(weight.value, layout, place, places) if is_cut else weight.value
        mine.append((tf.Variable(value), layout))
        placed[id(variable.handle)] = Placed(layout, [mine[-1][0].handle])
    passed: Any = stock
    if places > 1:
        passed = AxisPass(stock, "model", place, places, placed, None, [True, True])
        placed = {}
    partition = Partition(passed, [ROWS, ROWS], Rows.unknown(5), None, placed)
    along = {
        name: BackendExchange(backend.among(groups_along(sizes, name)))
        for name in sizes
    }
    exchange = BackendExchange(along["batch"]._backend, axes={"model": along["model"]})
    x = rng.normal(size=(5, 3, 2))
    labels = rng.integers(0, classes, 5).astype("int32")
    first, last = 5 * replica // replicas, 5 * (replica + 1) // replicas

    @tf.function(autograph=False)
    def emitted(x: tf.Tensor, labels: tf.Tensor) -> Any:
        def own() -> Any:
            fields = [tf.constant(n, tf.int64) for n in (first, last - first)]
            share = Share.of(
                tf.constant(5, tf.int64), [(*fields, tf.constant(not replica))]
            )
            made, _ = partition.emit([[x], [labels]], share, exchange, Traffic())
            return [tensors[0] for tensors in made]

        return backend.run(own, ())

    for _ in range(2):
        got = backend.call(emitted, (x[first:last], labels[first:last]))
        want = stock(tf.constant(x), tf.constant(labels))
        for a, b in zip(want, got, strict=True):
            assert_close(b, a, "a result", 1e-12)
    for variable, (held, layout) in zip(variables, mine, strict=True):
        value = variable.numpy()
        if layout != WHOLE:
            value = piece(value, layout, place, places)
        assert_close(held, value, "a variable", 1e-12)
