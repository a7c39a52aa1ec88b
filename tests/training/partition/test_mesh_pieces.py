"""Weights in pieces over the ranks of the batch (ZeRO-3), beside the whole."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from collective.training.partition import pending, pieces, window
from collective.training.partition.sizes import product
from tests.training.partition.meshed import Meshed, Ranks, Weight
from tests.training.partition.operands import generator

LAYERS, WIDTH = 4, 6


def descent(x: tf.Tensor, kernels: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Return the loss of layers of one width, and its gradients."""
    with tf.GradientTape() as tape:
        for kernel in kernels:
            x = tf.tanh(x @ kernel)
        loss = tf.reduce_mean(x**2)
    return loss, tape.gradient(loss, kernels)


def trained(given: Any, variables: Any) -> Any:
    """A step of Adam with a global norm, over layers of one width."""
    kernels, firsts, seconds = (
        variables[i * LAYERS : (i + 1) * LAYERS] for i in range(3)
    )
    loss, slopes = descent(given[0], kernels)
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in slopes]))
    for kernel, m, v, slope in zip(kernels, firsts, seconds, slopes, strict=True):
        slope = slope / tf.maximum(norm, 0.1)
        m.assign_add((slope - m) * 0.1)
        v.assign_add((tf.square(slope) - v) * 0.01)
        kernel.assign_sub(m * 0.1 / (tf.sqrt(v) + 1e-7))
    return [loss, norm]


@pytest.mark.parametrize("mesh", [(2, 1), (3, 1), (2, 2)], ids=str)
def test_zero_3(mesh: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, places = mesh
    monkeypatch.setattr(pending, "JOINED_BYTES", 8 * WIDTH * WIDTH // places)
    rng = generator(replicas)
    axes = [1, 0, 1, 0] if places > 1 else [None] * LAYERS
    weights = [
        Weight(
            rng.normal(size=(WIDTH, WIDTH)) ** (2 if kind == 2 else 1), axis, 1, True
        )
        for kind in range(3)
        for axis in axes
    ]
    x = rng.normal(size=(7, WIDTH))
    made = Meshed(trained, [x], [True], weights, places=places, replicas=replicas)
    ranks = Ranks(made, [True], replicas)
    for _ in range(2):
        ranks.compare([7 - (replicas - 1), *[1] * (replicas - 1)], [x])
    traffic = ranks.traffic[0]
    # Each kernel for the forward pass; for the backward pass all but that of the last
    # layer, which is at hand, and of the first, whose input has no gradient.
    assert len(traffic.joins) == 2 * LAYERS - 2
    assert len(traffic.scattered) == LAYERS
    assert not traffic.gathers
    # Each sends half of what a sum of the gradient would.
    moved = [*traffic.joins, *traffic.scattered]
    summed = 2 * LAYERS * WIDTH * WIDTH // places
    assert sum(product(value.shape or ()) for value in moved) <= 1.5 * summed
    # They leave while the backward pass goes on, and not together behind it.
    at_once = [len({*values} & {*traffic.scattered}) for values in traffic.sums]
    assert max(at_once) <= 2


def test_a_join_waits_for_the_layer_before_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending, "JOINED_BYTES", 1)
    rng = generator(0)
    weights = [
        Weight(rng.normal(size=(WIDTH, WIDTH)), None, 1, True)
        for _ in range(3 * LAYERS)
    ]
    x = rng.normal(size=(4, WIDTH))
    made = Meshed(trained, [x], [True], weights, places=1, replicas=2)
    ranks = Ranks(made, [True], 2)
    graph = ranks.graph
    products = [op for op in graph.get_operations() if op.type == "MatMul"]
    third = products[2 * 2]  # of rank 0, whose layers come in turn with rank 1's
    assert any(_is_behind(third, op) for op in products[:2])


def test_slots_in_pieces_keep_few_gradients_and_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "UNSENT_BYTES", 1)
    monkeypatch.setattr(pieces, "LARGE", 1)
    rng = generator(2)
    width = 2 * WIDTH  # so that a gradient is larger than what it is made of
    weights = [
        Weight(rng.normal(size=(width, width)) ** 2, None, 1, kind > 0)
        for kind in range(3)
        for _ in range(LAYERS)
    ]
    x = rng.normal(size=(2, width))
    made = Meshed(trained, [x], [True], weights, places=1, replicas=2)
    ranks = Ranks(made, [True], 2)
    for _ in range(2):
        ranks.compare([1, 1], [x])
    assert len(ranks.traffic[0].scattered) == len(ranks.traffic[0].joins) == LAYERS
    operations = ranks.graph.get_operations()
    gates = [op for op in operations if op.type == "NoOp" and op.control_inputs]
    held = {op.type for op in operations if {*op.control_inputs} & {*gates}}
    # Gradients, and what the changes of weights are computed of.
    assert {"MatMul", "Sqrt", "RealDiv"} <= held


def descended(given: Any, variables: Any) -> Any:
    """A step of gradient descent."""
    loss, slopes = descent(given[0], variables)
    for kernel, slope in zip(variables, slopes, strict=True):
        kernel.assign_sub(slope * 0.1)
    return [loss]


def test_a_piece_is_updated_before_the_backward_pass_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending, "JOINED_BYTES", 1)
    rng = generator(1)
    weights = [
        Weight(rng.normal(size=(WIDTH, WIDTH)), None, 1, True) for _ in range(LAYERS)
    ]
    x = rng.normal(size=(5, WIDTH))
    made = Meshed(descended, [x], [True], weights, places=1, replicas=2)
    ranks = Ranks(made, [True], 2)
    for _ in range(2):
        ranks.compare([3, 2], [x])
    operations = ranks.graph.get_operations()
    last = [op for op in operations if op.type == "MatMul"][-1]
    writes = [op for op in operations if op.type == "AssignSubVariableOp"]
    behind = [_is_behind(op, last) for op in writes]
    assert 0 < sum(behind) < len(behind)


def _is_behind(op: tf.Operation, other: tf.Operation) -> bool:
    """Whether an operation, or its second input, is made only after another operation."""
    stack: list[tf.Operation] = [op.inputs[1].op, *op.control_inputs]
    seen: set[str] = set()
    while stack:
        found = stack.pop()
        if found is other:
            return True
        if found.name not in seen:
            seen.add(found.name)
            stack += [t.op for t in found.inputs] + list(found.control_inputs)
    return False


def looked_up(given: Any, variables: Any) -> Any:
    """Look rows up in a table by its handle, and read its shape."""
    table, bias = variables
    found = table.sparse_read(given[0])
    one = tf.raw_ops.ResourceGatherNd(
        resource=table.handle, indices=given[0][:, None], dtype=tf.float64
    )
    size = tf.raw_ops.VariableShape(input=table.handle)
    bias.assign_add(tf.reduce_sum(found, 0))
    return [found + one, size]


def test_look_ups_in_a_table_in_pieces() -> None:
    rng = generator(5)
    weights = [
        Weight(rng.normal(size=(5, 3)), None, 1, True),
        Weight(rng.normal(size=3)),
    ]
    numbers = rng.integers(0, 5, 7).astype("int32")
    made = Meshed(looked_up, [numbers], [True], weights, places=1, replicas=2)
    ranks = Ranks(made, [True], 2)
    ranks.compare([4, 3], [numbers])
