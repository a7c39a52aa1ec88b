"""Variables cut over a model axis, and rows over another, beside the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.training.partition.meshed import Meshed, Ranks, Weight
from tests.training.partition.operands import generator
from tests.training.partition.partitioned import cut

Arrays = Sequence[np.ndarray]


def checked(
    function: Callable[..., Any],
    rows: Callable[[int], Arrays],
    weights: Sequence[Weight],
    *,
    seed: int,
    places: int,
    whole: Arrays = (),
) -> Meshed:
    """Compares a function and its gradients on random meshes with the whole.

    Args:
        function: Of arguments and variables; returns tensors.
        rows: Makes the arguments of so many rows.
        whole: More arguments, without rows.
    """
    rng = generator(seed)
    replicas = int(rng.integers(1, 4))

    def with_slopes(given: list[tf.Tensor], variables: list[tf.Variable]) -> Any:
        with tf.GradientTape() as tape:
            by = [t for t in given if t.dtype.is_floating]
            tape.watch(by)
            made = tf.nest.flatten(function(given, variables))
            smooth = [tf.reduce_sum(tf.sin(t)) for t in made if t.dtype.is_floating]
            score = tf.add_n(smooth)
        slopes = tape.gradient(score, [*by, *variables])
        return [*made, *(tf.convert_to_tensor(g) for g in slopes if g is not None)]

    count = int(rng.integers(2, 7))
    example = rows(count)
    has_rows = [*[True] * len(example), *[False] * len(whole)]
    made = Meshed(
        with_slopes,
        [*example, *whole],
        has_rows,
        weights,
        places=places,
        replicas=replicas,
    )
    for length in (count, 1):
        arguments = [*rows(length), *whole]
        made.compare(cut(rng, length, replicas), arguments)
    return made


@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_columns_then_rows(places: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        up, bias, down = variables
        return tf.tanh(given[0] @ up + bias) @ down

    weights = [
        Weight(rng.normal(size=(3, 12)), 1),
        Weight(rng.normal(size=12), 0),
        Weight(rng.normal(size=(12, 2)), 0),
    ]
    made = checked(
        function,
        lambda n: [rng.normal(size=(n, 3))],
        weights,
        seed=places,
        places=places,
    )
    assert not made.model.fallbacks and not made.model.gathers
    assert len(made.model.traffic.sums) == 2  # forward, and of the gradient of x


@pytest.mark.parametrize(("places", "replicas"), [(2, 1), (2, 2), (3, 2)])
def test_graphs_of_ranks_exchange_alike(places: int, replicas: int) -> None:
    rng = generator(places)

    def function(given: Any, variables: Any) -> Any:
        up, bias, down = variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(given[0] @ up + bias) @ down) ** 2)
        slopes = tape.gradient(loss, variables)
        norm = tf.linalg.global_norm(slopes)
        for variable, slope in zip(variables, slopes, strict=True):
            variable.assign_sub(slope / norm)
        return [loss, norm]

    weights = [
        Weight(rng.normal(size=(3, 12)), 1),
        Weight(rng.normal(size=12), 0),
        Weight(rng.normal(size=(12, 2)), 0),
    ]
    x = rng.normal(size=(5, 3))
    made = Meshed(function, [x], [True], weights, places=places, replicas=replicas)
    ranks = Ranks(made, [True], replicas)
    counts = cut(rng, 5, replicas)
    ranks.compare(counts, [x])
    kinds = [call.split()[0] for call in ranks.along[0].calls]
    assert kinds == ["sum"] * 2  # between the layers, and of the squares for the norm
