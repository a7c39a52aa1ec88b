"""With a GPU, repeated rows are added up on the host; here the GPU is pretended."""

from __future__ import annotations

import tensorflow as tf

from collective.tensorflow_ops import repeated_rows
from collective.tensorflow_ops.xla import compiled_around_collectives


def dense(slices):
    with repeated_rows.added_in_order([slices]):
        return tf.convert_to_tensor(slices)


def operations(graph):
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from function.graph.get_operations()


def test_eagerly_and_where_nothing_repeats(pretended_gpu):
    slices = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([1, 1]), tf.constant([3, 1]))
    assert dense(slices).numpy().tolist() == [[0], [2], [0]]
    assert not repeated_rows.parts_ranks([tf.ones([2])])


def compiled(operations, kind):
    """Return whether XLA may compile the operations of a kind; there must be some."""
    return {o.get_attr("_XlaCompile") for o in operations if o.type == kind}


def test_xla_leaves_what_only_values_of_a_step_decide(pretended_gpu):
    @tf.function
    @compiled_around_collectives
    def added(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([5, 3], tf.int64))
        return dense(slices) + tf.tanh(values[0])

    graph = added.get_concrete_function(
        tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int32)
    ).graph
    found = list(operations(graph))
    assert compiled(found, "UnsortedSegmentSum") == {False}
    assert compiled(found, "Tanh") == {True}
