"""Rules for what weights are cut along: channels, words, classes, units; beside the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.meshed import Meshed, Weight
from tests.training.partition.operands import generator, left_out
from tests.training.partition.test_mesh import checked

PLACES = [left_out(1), 2, 3, left_out(4)]
places_of = pytest.mark.parametrize("places", PLACES)
C = 12  # divides by all


def images(rng: np.random.Generator, channels: int = 3) -> Callable[[int], Any]:
    return lambda n: [rng.normal(size=(n, 5, 4, channels))]


def assert_no_gathers(made: Meshed) -> None:
    """Of one rank, any layout is the whole."""
    if made.places > 1:
        assert not made.model.fallbacks and not made.model.gathers


@places_of
def test_channels_of_convolutions(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        out, bias, into, each, up = variables
        x = tf.nn.conv2d(given[0], out, 1, "SAME")
        x = tf.nn.relu(tf.nn.bias_add(x, bias))
        x = tf.nn.depthwise_conv2d(x, each, [1, 1, 1, 1], "SAME")
        x = tf.nn.max_pool2d(x, 2, 1, "SAME") + tf.nn.avg_pool2d(x, 2, 1, "SAME")
        x = tf.nn.conv2d(x, into, [1, 2, 1, 1], "VALID")
        shape = tf.stack([tf.shape(x)[0], 2, 4, C])
        y = tf.nn.conv2d_transpose(x, up, shape, 1, "SAME")
        return [x, tf.reduce_mean(y, [1, 2])]

    weights = [
        Weight(rng.normal(size=(3, 3, 3, C)), 3),
        Weight(rng.normal(size=C), 0),
        Weight(rng.normal(size=(2, 1, 2 * C, 2)), 2),
        Weight(rng.normal(size=(2, 2, C, 2)), 2),
        Weight(rng.normal(size=(2, 2, C, 2)), 2),
    ]
    made = checked(function, images(rng), weights, seed=places, places=places)
    assert_no_gathers(made)


@places_of
def test_channels_of_volumes(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        out, into = variables
        x = tf.nn.conv3d(given[0], out, [1] * 5, "SAME")
        return [tf.nn.conv3d(tf.tanh(x), into, [1] * 5, "VALID")]

    weights = [
        Weight(rng.normal(size=(2, 2, 1, 2, C)), 4),
        Weight(rng.normal(size=(1, 2, 1, C, 3)), 3),
    ]
    rows = lambda n: [rng.normal(size=(n, 2, 3, 2, 2))]  # noqa: E731
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


@places_of
def test_output_channels_of_a_cut_input_are_gathered_and_right(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        one, two = variables
        x = tf.nn.conv2d(given[0], one, 1, "SAME")
        return [tf.nn.conv2d(x, two, 1, "SAME")]

    weights = [
        Weight(rng.normal(size=(1, 2, 3, C)), 3),
        Weight(rng.normal(size=(1, 2, C, C)), 3),
    ]
    made = checked(function, images(rng), weights, seed=places, places=places)
    assert not made.model.fallbacks


def test_groups_of_channels_are_not_taken_for_all_of_them() -> None:
    rng = generator(1)

    def function(given: Any, variables: Any) -> Any:
        found = tf.nn.conv2d(given[0], tf.stop_gradient(variables[0]), 1, "SAME")
        return [tf.stop_gradient(found), given[0] * 2]  # it has no gradient on a CPU

    weights = [Weight(rng.normal(size=(1, 2, 2, C)), 3)]
    checked(function, images(rng, 4), weights, seed=0, places=2)


@places_of
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("by_read", [False, True])
def test_look_ups(places: int, axis: int, by_read: bool) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        (table,) = variables
        found = tf.gather(table + 0 if by_read else table, given[0])
        return [found, tf.reduce_sum(found * found, -1)]

    def rows(n: int) -> Any:
        return [rng.integers(0, C, (n, 3)).astype("int32")]

    weights = [Weight(rng.normal(size=(C, C)), axis)]
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


@pytest.mark.parametrize("number", [-1, C])
def test_a_number_that_no_table_has_is_an_error_as_before(number: int) -> None:
    rng = generator(0)
    weights = [Weight(rng.normal(size=(C, 2)), 0)]

    def function(given: Any, variables: Any) -> Any:
        return [tf.gather(variables[0], given[0])]

    made = checked(
        function,
        lambda n: [rng.integers(0, C, n).astype("int32")],
        weights,
        seed=0,
        places=2,
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        made.rows(
            [2] + [0] * (made.rows.replicas - 1), [np.array([0, number], "int32")]
        )


@places_of
@pytest.mark.parametrize("axis", [0, 1])
def test_updates_of_rows_of_a_table(places: int, axis: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        (table,) = variables
        slices = tf.IndexedSlices(given[1], given[0])
        table.scatter_sub(slices)
        table.scatter_add(tf.IndexedSlices(given[1] * 2, given[0]))
        table.scatter_update(tf.IndexedSlices(given[2], [1, 4]))
        return [tf.reduce_sum(table)]

    weights = [Weight(rng.normal(size=(C, C)), axis)]
    rows = lambda n: [  # noqa: E731
        rng.integers(0, C, n).astype("int32"),
        rng.normal(size=(n, C)),
    ]
    checked(
        function,
        rows,
        weights,
        seed=places,
        places=places,
        whole=[rng.normal(size=(2, C))],
    )


@places_of
@pytest.mark.parametrize("kind", ["sparse", "dense", "softmax", "log_softmax"])
def test_classes(places: int, kind: str) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        x, labels, dense = given
        logits = x @ variables[0]
        if kind == "sparse":
            return [
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits),
                tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(
                        tf.stack([labels, labels], 1), tf.stack([logits, -logits], 1)
                    )
                ),
            ]
        if kind == "dense":
            return [tf.nn.softmax_cross_entropy_with_logits(dense, logits)]
        made = tf.nn.softmax(logits) if kind == "softmax" else tf.nn.log_softmax(logits)
        return [tf.reduce_sum(made * dense, -1)]

    def rows(n: int) -> Any:
        labels = rng.integers(0, C, n)
        dense = rng.uniform(size=(n, C))
        return [rng.normal(size=(n, 3)) * 20, labels, dense]

    weights = [Weight(rng.normal(size=(3, C)), 1)]
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


@places_of
@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_largest_classes(places: int, most: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        logits = tf.round(given[0] @ variables[0])  # some are equal
        found = tf.math.top_k(logits[:, None], most)
        hits = tf.math.in_top_k(given[1], tf.cast(logits, tf.float32), most)
        best = [tf.argmax(logits, -1), tf.argmin(tf.transpose(logits), 0)]
        return [found.values, found.indices, hits, *best]

    def rows(n: int) -> Any:
        return [rng.normal(size=(n, 2)) * 2, rng.integers(0, C, n).astype("int32")]

    weights = [Weight(rng.normal(size=(2, C)), 1)]
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


@places_of
def test_numbers_of_classes_are_made_in_parts(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        logits = given[0] @ variables[0]
        return [tf.reduce_sum(tf.one_hot(given[1], C, dtype=logits.dtype) * logits, -1)]

    def rows(n: int) -> Any:
        return [rng.normal(size=(n, 2)), rng.integers(-1, C, n).astype("int32")]

    weights = [Weight(rng.normal(size=(2, C)), 1)]
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


@places_of
def test_one_kernel_of_three_projections(places: int) -> None:
    rng = generator(places)
    heads, size = C, 2

    def function(given: Any, variables: Any) -> Any:
        kernel, bias, out = variables
        x = given[0]
        q, k, v = tf.split(x @ kernel + bias, 3, -1)

        def by_head(t: tf.Tensor) -> tf.Tensor:
            t = tf.reshape(t, [tf.shape(x)[0], 5, heads, size])
            return _turned(tf.transpose(t, [0, 2, 1, 3]))

        weights = tf.nn.softmax(tf.matmul(by_head(q), by_head(k), transpose_b=True))
        seen = tf.transpose(tf.matmul(weights, by_head(v)), [0, 2, 1, 3])
        return [tf.reshape(seen, [tf.shape(x)[0], 5, heads * size]) @ out]

    width = heads * size
    weights = [
        Weight(rng.normal(size=(3, 3 * width)), 1, 3),
        Weight(rng.normal(size=3 * width), 0, 3),
        Weight(rng.normal(size=(width, 3)), 0),
    ]
    rows = lambda n: [rng.normal(size=(n, 5, 3)) * 0.3]  # noqa: E731
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


def _turned(x: tf.Tensor) -> tf.Tensor:
    """Rotary halves, as KerasHub has them."""
    angles = tf.range(x.shape[2], dtype=x.dtype)[:, None]
    half = x.shape[-1] // 2
    one, two = x[..., :half], x[..., half:]
    turned = tf.concat([-two, one], -1)
    return x * tf.cos(angles) + turned * tf.sin(angles)


@places_of
def test_units_of_a_loop(places: int) -> None:
    rng = generator(places)
    units = C

    def function(given: Any, variables: Any) -> Any:
        kernel, recurrent, bias = variables
        x = given[0]
        zeros = tf.zeros([tf.shape(x)[0], units], x.dtype)

        def cell(t: Any, h: Any, c: Any) -> Any:
            z = x[:, t] @ kernel + h @ recurrent + bias
            i, f, g, o = tf.split(z, 4, 1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
            return t + 1, tf.sigmoid(o) * tf.tanh(c), c

        _, h, c = tf.while_loop(lambda t, *_: t < 3, cell, [0, zeros, zeros])
        return [h, c]

    weights = [
        Weight(rng.normal(size=(2, 4 * units)), 1, 4),
        Weight(rng.normal(size=(units, 4 * units)) * 0.3, 1, 4),
        Weight(rng.normal(size=4 * units), 0, 4),
    ]
    rows = lambda n: [rng.normal(size=(n, 3, 2))]  # noqa: E731
    made = checked(function, rows, weights, seed=places, places=places)
    assert not made.model.fallbacks


@places_of
def test_handles_in_branches(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        kernel, bias = variables
        x = given[0]
        y = tf.cond(
            tf.reduce_sum(x) > 0, lambda: x @ kernel + bias, lambda: x @ kernel * bias
        )
        tf.cond(
            tf.reduce_sum(x) > 1,
            lambda: tf.group(kernel.assign_add(kernel * 0.5), bias.assign(bias * 2)),
            lambda: tf.group(bias.assign_sub(bias)),
        )
        return [y]

    weights = [Weight(rng.normal(size=(2, C)), 1), Weight(rng.normal(size=C), 0)]
    rows = lambda n: [rng.normal(size=(n, 2))]  # noqa: E731
    made = checked(function, rows, weights, seed=places, places=places)
    assert not made.model.fallbacks


@places_of
def test_draws_are_those_of_one_process(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        h = given[0] @ variables[0]
        return [tf.nn.experimental.stateless_dropout(h, 0.4, [1, 2]) @ variables[1]]

    weights = [
        Weight(rng.normal(size=(2, C)), 1),
        Weight(rng.normal(size=(C, 2)), 0),
    ]
    rows = lambda n: [rng.normal(size=(n, 2))]  # noqa: E731
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


@places_of
def test_a_norm_over_parts_is_a_sum(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        h = given[0] @ variables[0]
        mean, variance = tf.nn.moments(h, [-1], keepdims=True)
        h = (h - mean) * tf.math.rsqrt(variance + 1e-3) * variables[1]
        return [h @ variables[2]]

    weights = [
        Weight(rng.normal(size=(2, C)), 1),
        Weight(rng.normal(size=C), 0),
        Weight(rng.normal(size=(C, 2)), 0),
    ]
    rows = lambda n: [rng.normal(size=(n, 2))]  # noqa: E731
    made = checked(function, rows, weights, seed=places, places=places)
    assert_no_gathers(made)


def test_what_has_no_rule_for_a_cut_variable_is_refused_by_name() -> None:
    from collective.errors import UsageError

    rng = generator(0)

    with pytest.raises(UsageError, match="StridedSliceAssign"):
        checked(
            lambda given, variables: [
                variables[0][1:3].assign(tf.zeros([2, C], tf.float64)),
                given[0] @ variables[0],
            ],
            lambda n: [rng.normal(size=(n, C))],
            [Weight(rng.normal(size=(C, C)), 0)],
            seed=0,
            places=2,
        )
