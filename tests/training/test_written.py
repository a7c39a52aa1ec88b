"""What a step writes from the model's variables alone."""

from __future__ import annotations

import pytest
import tensorflow as tf

from collective.training.written import following


@pytest.mark.parametrize(
    "value, follows",
    [
        (lambda v, rows: 0.9 * v.state + 0.1 * v.weight, True),
        (lambda v, rows: v.state + 1.0, True),
        (lambda v, rows: v.other * v.weight, True),
        (lambda v, rows: v.state + tf.reduce_mean(rows), False),
        (lambda v, rows: v.metric * v.weight, False),
        (lambda v, rows: v.weight * tf.random.normal([]), False),
        (lambda v, rows: tf.where(tf.shape(rows)[0] > 2, v.state, v.weight), False),
        (lambda v, rows: v.of_rows + v.weight, False),
    ],
)
def test_no_row_has_a_part_in_it(value, follows):
    class Variables:
        state, weight, other, metric, of_rows = (tf.Variable(1.0) for _ in range(5))

    v = Variables

    @tf.function(autograph=False)
    def step(rows):
        v.weight.assign_sub(tf.reduce_mean(rows))  # an update, by a sum over replicas
        v.metric.assign_add(tf.reduce_sum(rows))
        v.of_rows.assign(tf.reduce_max(rows))
        v.other.assign(2 * v.weight)
        v.state.assign(value(v, rows))

    graph = step.get_concrete_function(tf.TensorSpec([None])).graph
    found = following(graph, [v.state, v.other, v.of_rows], {id(v.weight)})
    assert found == [v.state] * follows + [v.other]


def test_what_a_branch_writes_is_not_known():
    state, weight = tf.Variable(1.0), tf.Variable(2.0)

    @tf.function(autograph=False)
    def step(rows):
        tf.cond(weight > 1, lambda: state.assign(weight), lambda: state.assign(0.0))

    graph = step.get_concrete_function(tf.TensorSpec([None])).graph
    assert following(graph, [state], {id(weight)}) == []
