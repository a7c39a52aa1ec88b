"""Finds ranks that are about to train different things, before the first step.

Every rank describes its plan, model, code, optimizer and data in short texts with names.
Rank 0 broadcasts its own; each rank compares, and all raise the same error, which names
the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.log import log
from collective.training import keras_compat
from collective.training.input.leaves import checksum
from collective.training.input.pipeline import Input
from collective.training.input.ready_batches import ReadyBatches
from collective.training.keras_compat.traced import nodes_of
from collective.training.model.record import record_of
from collective.training.process import object_collectives
from collective.training.verification.descriptions import (
    describe,
    describe_model,
    short,
)
from collective.training.verification.settings import describe_settings

# Data of at most so many bytes are compared whole, larger ones by rows spread over them.
_WHOLE_BYTES, _SAMPLED_ROWS = 16 << 20, 64


def compare_data(
    backend: Backend,
    inputs: Input,
    validation: Input | None,
    settings: Mapping[str, object],
) -> None:
    """Refuse ranks with other settings, data or plan; every rank calls it.

    Args:
        inputs: The training data, and how they are cut into batches.
        settings: More arguments of ``fit`` that must be the same, by name.

    Raises:
        UsageError: Something differs; every rank names it, and the rank.
    """
    if backend.size == 1:
        return
    parts = describe_settings()
    parts |= {f"{k}=": short(describe(v)) for k, v in settings.items()}
    parts |= describe_data("training", inputs)
    if validation is not None:
        parts |= describe_data("validation", validation)
    compare(backend, parts)


def compare_settings(backend: Backend) -> None:
    """Refuse ranks with other settings of Keras or TensorFlow; every rank calls it."""
    if backend.size > 1:
        compare(backend, describe_settings())


def compare_models(backend: Backend, model: keras.Model) -> None:
    """Refuse ranks with another model, loss, metric or optimizer.

    A learning rate that is a variable becomes rank 0's, as weights do; rank 0 says so.
    """
    if backend.size == 1:
        return
    compare(backend, describe_model(model))
    optimizer = getattr(model, "optimizer", None)
    rate = None if optimizer is None else keras_compat.optimizers.plain_rate(optimizer)
    mine = np.nan if rate is None else float(np.asarray(rate))
    rates = object_collectives.gather_few(backend, [mine])[:, 0]
    others = np.flatnonzero(rates != rates[0])
    if np.isnan(mine) or not others.size or not record_of(model).is_new("rate"):
        return
    if backend.rank == 0:
        log.warning(
            "the learning rate is %g on rank %d and %g on rank 0: every rank takes rank "
            "0's. HINT: give every rank the same one",
            rates[others[0]],
            others[0],
            rates[0],
        )


def compare_graphs(backend: Backend, graph: tf.Graph) -> None:
    """Refuse ranks whose code drew other numbers while it was traced."""
    if backend.size == 1:
        return
    mine = _constants(graph)
    digest = short("\n".join(mine), 0)
    same = digest == object_collectives.broadcast_object(backend, digest)
    differs = object_collectives.gather_few(backend, [not same])[:, 0]
    if not differs.any():
        return
    rank = int(np.argmax(differs))
    first = set(object_collectives.broadcast_object(backend, mine))
    other = next((c for c in mine if c not in first), "one that is missing ")
    value = object_collectives.broadcast_object(backend, other, rank).rpartition(" ")[0]
    raise UsageError(
        f"the graph of the step has other constants on rank {rank} than on rank 0 "
        f"({value}): code of the model, its loss or a metric gives another number on "
        "each rank while it is traced, as a clock, a process id or os.urandom does",
        hint="compute it before fit, the same on every rank; or draw it by "
        "keras.random or tf.random",
    )


def _constants(graph: tf.Graph) -> list[str]:
    """Return the numeric constants of a graph, in an order that does not depend on names.

    They are the same on ranks that have traced the same program. Numbers of NumPy, Python
    or the clock become constants if code reads them while it is traced.
    """
    found = []
    for node in nodes_of(graph):
        tensor = node.attr["value"].tensor if node.op == "Const" else None
        if tensor is None or tensor.dtype == tf.string.as_datatype_enum:
            continue
        value = tf.make_ndarray(tensor)
        shown = str(value) if value.size == 1 else f"{value.dtype}{list(value.shape)}"
        found.append(f"{shown} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}")
    return sorted(found)


def compare_newcomers(backend: Backend, mine: Mapping[str, str]) -> None:
    """Reject ranks that joined with data or a model different from rank 0's.

    Args:
        backend: It broadcasts without a graph, so that this works after a change of the
            ranks.
    """
    first = object_collectives.broadcast_object(backend, dict(mine))
    name = _first_difference(mine, first)
    if name is not None:
        error = _error(backend.rank, 0, name, mine.get(name), first.get(name))
        error.everywhere = False
        raise error


def _first_difference(mine: Mapping[str, str], first: Mapping[str, str]) -> str | None:
    return next((n for n in [*first, *mine] if first.get(n) != mine.get(n)), None)


def compare(backend: Backend, mine: Mapping[str, str]) -> None:
    """Raise the same error on every rank if a rank's texts differ from rank 0's."""
    first = object_collectives.broadcast_object(backend, dict(mine))
    name = _first_difference(mine, first)
    differing = object_collectives.gather_few(backend, [name is not None])[:, 0]
    if not differing.any():
        return
    rank = int(np.argmax(differing))
    seen = name, mine.get(name or ""), first.get(name or "")
    more = np.count_nonzero(differing) - 1
    raise _error(rank, more, *object_collectives.broadcast_object(backend, seen, rank))


def _error(
    rank: int, more: int, name: str, mine: str | None, first: str | None
) -> UsageError:
    if name.endswith("rows"):
        what = f"the {name} are others on rank {rank} than on rank 0"
        hint = (
            "give every rank all of the data in the same order, and the same seed to "
            "every shuffle (NumPy's, too): each rank takes its share of every batch"
        )
    else:
        what = (
            f"{name} differs: {_shown(mine)} on rank {rank}, {_shown(first)} on rank 0"
        )
        hint = (
            "let every rank run the same code with the same arguments; only files and "
            "callbacks may depend on the rank"
        )
    others = f" (and on {more} more ranks)" if more else ""
    return UsageError(
        f"{what}{others}: the ranks would train different models", hint=hint
    )


def _shown(text: str | None) -> str:
    if text is None:
        return "none"
    text = short(text, 0) if text.startswith("def(") else text
    return f"code or values {text}" if text.startswith("#") else text


def describe_data(name: str, inputs: Input | ReadyBatches) -> dict[str, str]:
    """Describe plan and rows of a data set; of ready-made batches, only the shapes."""
    if not isinstance(inputs, Input):
        return {f"shapes of the {name} data": short(str(inputs.spec[:3]), 300)}
    plan, source = inputs.plan, inputs.source
    parts = {
        f"number of rows of the {name} data": str(inputs.rows),
        f"batch size of the {name} data": str(inputs.global_batch_size),
        f"seed of the {name} data": str(plan.seed) if plan.shuffle else "none",
        f"shuffle of the {name} data": str(plan.shuffle),
        f"kind of the {name} data": type(source).__name__,
        f"shapes of the {name} data": short(str(inputs.spec[:3]), 300),
    }
    for part, digest in _digests(inputs).items():
        parts[f"{name} {part} rows"] = digest
    return parts


def _digests(inputs: Input) -> dict[str, str]:
    """Return a checksum of rows for each of ``x``, ``y`` and ``sample_weight``."""
    if not inputs.source.random_access:
        return {"first": str(inputs.source.fingerprint())}
    total = inputs.rows
    size = sum(
        int(np.prod([length or 1 for length in spec.shape])) * spec.dtype.size
        for spec in tf.nest.flatten(inputs.source.spec)
        if spec is not None
    )
    numbers = np.arange(total)
    if size * total > _WHOLE_BYTES:
        numbers = np.unique(np.linspace(0, total - 1, _SAMPLED_ROWS).astype(np.int64))
    try:
        rows = inputs.source.read(tf.constant(numbers, tf.int64))
    except UsageError:  # a bad file, which the training names on the rank that reads it
        return {"readable": "no"}
    return {
        part: f"{int(checksum(value)):012x}"
        for part, value in zip(("x", "y", "sample_weight"), rows, strict=True)
        if value is not None and tf.nest.flatten(value)
    }
