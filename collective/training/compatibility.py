"""Which features of a training work together: one table, as data.

A pair that is not in the table works. ``IMPOSSIBLE`` has the pairs that mathematics
forbids, each with the sentence that says why; ``NOT_BUILT`` those that are not built,
each with what it would take. From the table are made the errors (``check``), the page
``docs/reference/compatibility.md``, and the test of all pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from collective.backends.base import Backend
from collective.errors import UsageError

ONE_EACH = "a backend with one replica in each process, as native, mpi, tf-multiworker"


@dataclass(frozen=True)
class Feature:
    """Something that a training may have."""

    title: str  # its name in an error; ``{backend}`` is the name of the backend
    without: str  # what to do to be without it


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
    "accumulate": Feature("--accumulate", "drop --accumulate"),
    "tensor_parallel": Feature("--tensor-parallel", "drop --tensor-parallel"),
    "model_parallel": Feature(
        "layers on several devices (--model-parallel)", "drop --model-parallel"
    ),
    "elastic": Feature(
        "an elastic job (--min-np)",
        "drop --min-np, and continue from a --checkpoint-dir",
    ),
    "joins": Feature("ranks that join a running job (--max-np)", "drop --max-np"),
    "checkpoint": Feature(
        "a checkpoint (--checkpoint-dir)",
        "keras.callbacks.BackupAndRestore, which works with any data",
    ),
    "ledger": Feature("--ledger", "drop --ledger"),
    "batches": Feature(
        "batches whose rows are not known beforehand",
        "pass arrays; or dataset.unbatch() of known length, with global_batch_size=",
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
    "unedited": Feature("an unedited script", "call collective.fit in the script"),
    "loops": Feature("a training loop of the script's own (--loops)", "drop --loops"),
}

Pairs = Mapping[frozenset[str], str]


def _pairs(table: Mapping[str, str]) -> Pairs:
    """From ``"one with other, another": why``."""
    found = {}
    for names, why in table.items():
        one, others = names.split(" with ")
        for other in others.split(", "):
            found[frozenset((one, other))] = why
    assert set().union(*found) <= set(FEATURES)
    return found


IMPOSSIBLE = _pairs(
    {
        "asynchronous with virtual_replicas": (
            "there is no global batch, for each worker has batches of its own"
        ),
        "asynchronous with shard_optimizer": (
            "its servers hold the optimizer's state in shards already"
        ),
        "asynchronous with loss_scale": (
            "a loss scale follows from the steps before, and these have no order"
        ),
        "asynchronous with unedited": (
            "not every rank runs the script, and no two workers share a batch"
        ),
        "tensor_parallel with elastic": (
            "a rank that dies takes its part of the layers with it"
        ),
        "tensor_parallel with virtual_replicas": (
            "a layer in T parts adds T products, and T is a number of ranks, on which "
            "the bits must not depend"
        ),
        "transport with virtual_replicas": (
            "each rank rounds the sum of its own pieces, so the bits depend on how many "
            "ranks there are"
        ),
        "shard_optimizer with elastic": (
            "a rank that dies takes its shard of the optimizer with it"
        ),
        "hook with virtual_replicas": (
            "each replica keeps what it has not sent, so the bits depend on how many "
            "replicas there are"
        ),
        "hook with asynchronous": (
            "gradients are not summed over replicas, for each worker applies its own"
        ),
        "batches with ledger": (
            "a ledger has the numbers of rows, and rows of such batches have none"
        ),
        "per_replica with virtual_replicas, elastic": (
            "the trained model then depends on the number of ranks, which may change"
        ),
        "devices with elastic": "all replicas of one process die with it",
    }
)

NOT_BUILT = _pairs(
    {
        "per_replica with accumulate": (
            "micro-batches are computed one after the other, and each sees a part of the rows"
        ),
        "per_replica with devices, tensor_parallel, model_parallel": (
            "a replica runs the whole step by itself, in a process of its own"
        ),
        "per_replica with shard_optimizer, hook": (
            "Keras' own step runs as it is, and gradients are averaged where it applies them"
        ),
        "own_step with tensor_parallel": (
            "a norm that it takes of gradients would be that of this rank's parts"
        ),
        "own_step with asynchronous": "a worker would have to run the whole step",
        "virtual_replicas with model_parallel": "the pieces run on one device",
        "model_parallel with shard_optimizer, tensor_parallel": (
            "these work on a model that is on one device"
        ),
        "shard_optimizer with tensor_parallel": (
            "variables that are cut already would be cut again"
        ),
        "shard_optimizer with devices": (
            "a strategy makes each variable of the optimizer whole on every device; a "
            "rank with one device has shards of its own"
        ),
        "hook with shard_optimizer, tensor_parallel": (
            "a rank with shards of variables would need shards of what the hook keeps"
        ),
        "hook with model_parallel": (
            "what the hook keeps would have to be on the devices of the layers"
        ),
        "hook with devices": ("each replica of a process would need errors of its own"),
        "hook with loss_scale": (
            "what is left over would change with the loss scale, and a step that "
            "overflows would have to leave it alone"
        ),
        "hook with transport": (
            "what rounding takes away would have to be part of what is left over"
        ),
        "unedited with joins": (
            "a rank that joins would begin the script where the others are in its middle"
        ),
        "loops with elastic": (
            "what a step has changed in the script itself would have to be undone before "
            "it is made again"
        ),
    }
)

def of_backend(backend: Backend) -> set[str]:
    """The features that a training has by its backend."""
    found = {
        "asynchronous": not backend.synchronous,
        "devices": len(backend.local_replicas) > 1,
        "elastic": backend.elastic,
        "tensor_parallel": backend.tensor is not None,
        "model_parallel": bool(backend.stages),
        "transport": backend.rounds_to is not None,
    }
    return {name for name, present in found.items() if present}


def conflicts(features: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """The pairs among features that do not work together, and why."""
    present = set(features)
    for table in (IMPOSSIBLE, NOT_BUILT):
        for pair, why in table.items():
            if pair <= present:
                one, other = sorted(pair, key=list(FEATURES).index)
                yield one, other, why


def works(features: Iterable[str], backend: Backend) -> bool:
    """Whether features work together on a backend."""
    return not any(conflicts({*features, *of_backend(backend)}))


def check(features: Iterable[str], backend: Backend) -> None:
    """Refuses features that do not work together, or not on this backend.

    Raises:
        UsageError: On every rank alike, for the first such pair.
    """
    for one, other, _ in conflicts({*features, *of_backend(backend)}):
        raise refusal(one, other, backend.name)


def refusal(one: str, other: str, backend: str = "") -> UsageError:
    """The error for two features that do not work together."""
    pair = frozenset((one, other))
    why = {**IMPOSSIBLE, **NOT_BUILT}[pair]
    first, second = FEATURES[one], FEATURES[other]
    title = f"{first.title} does not work with {second.title}"
    return UsageError(
        f"{title.format(backend=backend)}: {why}",
        hint=f"{second.without}; or {first.without}",
    )
