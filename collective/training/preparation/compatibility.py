"""Which features of a training work together: one table, as data.

All pairs that are not refused here work. ``PAIRS`` has those that are refused, each with the
reason in a sentence. The errors of ``check``, the page ``docs/reference/compatibility.md``,
and the test of all pairs are made from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from collective.backends.base import Backend
from collective.errors import UsageError

ONE_EACH = "a backend with one replica in each process, as native, mpi, tf-multiworker"


@dataclass(frozen=True)
class Feature:
    """Something that a training may have."""

    title: str  # its name in an error; ``{backend}`` is the name of the backend
    without: str  # how to do without it


FEATURES = {
    "own_step": Feature(
        "a train_step of the model's own",
        "train it by Keras' own fit with the drop-in: import collective.tensorflow.keras "
        "as hvd; hvd.init(); optimizer = hvd.DistributedOptimizer(optimizer)",
    ),
    "per_replica": Feature(
        "per_replica (replicas with batches of their own)", "drop per_replica"
    ),
    "virtual_replicas": Feature("--virtual-replicas", "drop --virtual-replicas"),
    "shard_optimizer": Feature("--shard-optimizer", "drop --shard-optimizer"),
    "shard_weights": Feature("--shard-weights", "drop --shard-weights"),
    "accumulate": Feature("--accumulate", "drop --accumulate"),
    "tensor_parallel": Feature("--tensor-parallel", "drop --tensor-parallel"),
    "elastic": Feature(
        "an elastic job (--min-np)",
        "drop --min-np, and continue from a --checkpoint-dir",
    ),
    "loss_scale": Feature(
        "a LossScaleOptimizer (mixed_float16)", "--precision float32 or mixed_bfloat16"
    ),
    "transport": Feature("--transport-dtype", "drop --transport-dtype"),
    "devices": Feature(
        "several replicas in one process (backend {backend!r})", ONE_EACH
    ),
    "asynchronous": Feature(
        "workers that train on batches of their own (backend {backend!r})", ONE_EACH
    ),
    "hook": Feature("a communication hook (--hook)", "drop --hook"),
}

IN_PIECES = "gradients are summed in pieces, where the other needs whole sums"
#: The features of workers that do not wait for each other: only Keras' own step.
OF_WORKERS = ("own_step",)
NO_ORDER = "each worker makes Keras' own step of a batch of its own, in no order"


def _pairs(table: Mapping[str, str]) -> Mapping[frozenset[str], str]:
    """Parse keys of the form ``"one with other, another": why``."""
    found = {}
    for names, why in table.items():
        one, others = names.split(" with ")
        for other in others.split(", "):
            found[frozenset((one, other))] = why
    assert set().union(*found) <= set(FEATURES)
    return found


PAIRS = _pairs(
    {
        "elastic with shard_optimizer, shard_weights, tensor_parallel": (
            "a rank that dies takes its part of the variables with it"
        ),
        "elastic with per_replica": (
            "the trained model depends on the number of ranks, which may change"
        ),
        "elastic with devices": "all replicas of one process die with it",
        "transport with virtual_replicas": (
            "each rank rounds the sum of its own pieces, so the bits depend on how many "
            "ranks there are"
        ),
        "hook with transport": (
            "what rounding takes away would have to be part of what is left over"
        ),
        "hook with loss_scale": (
            "what is left over would change with the loss scale, and a step that "
            "overflows would have to leave it alone"
        ),
        "devices with per_replica, hook, shard_optimizer, shard_weights": (
            "each process would need a step, or a state, for each of its replicas"
        ),
        "per_replica with accumulate": (
            "micro-batches are computed one after the other, and each sees a part of the "
            "rows"
        ),
        "per_replica with virtual_replicas": (
            "one gives the bits of one process, and the other another model"
        ),
        "hook with per_replica, virtual_replicas": (
            "each replaces the sum of gradients over the ranks by another"
        ),
        "shard_optimizer with per_replica, virtual_replicas, hook": IN_PIECES,
        "shard_weights with per_replica, virtual_replicas, hook": IN_PIECES,
        "tensor_parallel with per_replica, virtual_replicas, hook": (
            "ranks that share rows have parts of the gradients, where the other needs whole ones"
        ),
    }
)


def of_backend(backend: Backend) -> set[str]:
    """Return the features that a training has because of its backend."""
    found = {
        "asynchronous": not backend.synchronous,
        "devices": len(backend.local_replicas) > 1,
        "elastic": backend.elastic,
        "tensor_parallel": backend.options.tensor_parallel > 1,
        "transport": backend.rounds_to is not None,
    }
    return {name for name, present in found.items() if present}


def why_not(one: str, other: str) -> str | None:
    """Return the reason why two features do not work together, or None if they do."""
    pair = {one, other}
    if "asynchronous" in pair:
        return None if pair & {*OF_WORKERS} else NO_ORDER
    return PAIRS.get(frozenset(pair))


def conflicts(features: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the pairs of features that do not work together, each with the reason."""
    for pair in itertools.combinations([f for f in FEATURES if f in features], 2):
        why = why_not(*pair)
        if why is not None:
            yield *pair, why


def check(features: Iterable[str], backend: Backend) -> None:
    """Refuse features that do not work together, or not on this backend.

    Raises:
        UsageError: On every rank alike, for the first such pair.
    """
    for one, other, why in conflicts({*features, *of_backend(backend)}):
        first, second = FEATURES[one], FEATURES[other]
        title = f"{first.title} does not work with {second.title}"
        raise UsageError(
            f"{title.format(backend=backend.name)}: {why}",
            hint=f"{second.without}; or {first.without}",
        )
