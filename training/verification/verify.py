"""``verify_step``: rank 0 checks the step, and every rank gets its plan or its error."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import UsageError
from collective.launch import versions
from collective.log import log
from collective.training import exchange
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.prepared import PreparedModel
from collective.training.replica.plan import StepPlan
from collective.training.replica.rows import Rows
from collective.training.verification import plan_cache
from collective.training.verification.check import Check, NotComparable
from collective.training.verification.first_rows import count, first_rows
from collective.training.verification.model_description import describe_model
from collective.training.verification.pieces import untraced
from collective.training.virtual.pieces import VirtualReplicas

VARIABLE = "COLLECTIVE_VERIFY"
# Rows that are compared, and how they are cut: unevenly, so that a mean of means differs
# from the mean.
_ROWS, _PIECES = 7, (4, 2, 1)
# Gradients of Keras' step and of ours are in memory at once, beside those of the training.
_MOST_BYTES = 2 << 30


def verify_step(
    prepared: PreparedModel,
    backend: Backend,
    inputs: Input | Batches,
    validation: Input | Batches | None = None,
    *,
    accumulate: int = 1,
    seed: int = 0,
    sync_batch_norm: bool = False,
    enabled: bool = True,
    verbose: str | int = "auto",
    pieces: Sequence[int] | None = None,
    virtual: VirtualReplicas | None = None,
) -> StepPlan:
    """Compares our step with Keras' own before it trains; every rank calls it.

    Rank 0 computes loss, gradients, metrics and state of a few rows of the first batch
    twice: by Keras' own step at once, and by ours in pieces as replicas would. No
    variable is changed.

    Args:
        prepared: The model, with all of its variables.
        backend: Sums over replicas.
        inputs: What will be trained on; where it is no ``Input``, it has ``spec``.
        validation: What will be evaluated; None for nothing.
        accumulate: Micro-batches per update and replica.
        seed: Of random layers.
        sync_batch_norm: As for ``fit``.
        enabled: False: nothing is done. So it is with ``COLLECTIVE_VERIFY=0``. That of
            rank 0 counts.
        verbose: 0: nothing is printed.
        pieces: Sizes to cut the rows into; by default unevenly where several replicas or
            micro-batches share a batch, else not at all.
        virtual: The virtual replicas that share a batch; None: the backend's replicas.

    Returns:
        The plan, the same on every rank.

    Raises:
        UsageError: On every rank: the step would train another model than Keras', and
            why it probably does.
    """
    # Rank 0 decides, so that no rank waits where a variable is not set on all hosts.
    found: dict[str, Any] = {"plan": asdict(StepPlan()), "line": None}
    enabled = enabled and os.environ.get(VARIABLE) != "0"
    if backend.rank == 0 and enabled:
        replicas = virtual.count if virtual else backend.most_replicas
        cut = accumulate > 1 or replicas > 1
        sizes = pieces or (_PIECES if cut else (_ROWS,))
        with backend.only_rank_zero("the comparison with Keras' own step"):
            checking = _Checking(
                prepared,
                backend,
                inputs,
                validation,
                list(sizes),
                seed,
                sync_batch_norm,
            )
            found = _found(checking)
    if backend.size > 1:
        found = exchange.broadcast_object(backend, found)
    if "error" in found:
        raise UsageError(found["error"], hint=found["hint"])
    plan = StepPlan(**(found["plan"] | {"notes": tuple(found["plan"]["notes"])}))
    if backend.rank == 0 and str(verbose) != "0":
        for line in (*plan.notes, found["line"]):
            if line is not None:
                log.info(line)
    return plan


@dataclass(frozen=True)
class _Checking:
    """What is checked: the arguments of ``verify_step``."""

    prepared: PreparedModel
    backend: Backend
    inputs: Any
    validation: Any
    sizes: list[int]
    seed: int
    sync_batch_norm: bool


def _found(checking: _Checking) -> dict[str, Any]:
    """The plan, or the error, and a line about the check itself. On rank 0."""
    start = time.perf_counter()
    try:
        plan, how = _plan(checking)
    except UsageError as error:
        return {"error": error.message, "hint": error.hint}
    except NotComparable as why:
        first = str(why).strip().split("\n")[0]
        plan, how = StepPlan(), f"could not be compared with Keras' own: {first}"
    seconds = time.perf_counter() - start
    return {"plan": asdict(plan), "line": f"the step {how} ({seconds:.1f} s)"}


def _plan(checking: _Checking) -> tuple[StepPlan, str]:
    """The plan, and how it was found."""
    prepared, inputs = checking.prepared, checking.inputs
    _check_comparable(prepared, checking.backend)
    most, sync = sum(checking.sizes), checking.sync_batch_norm
    rows = first_rows(inputs, most)
    if rows is None:
        raise NotComparable("its data are no plain tensors, or can be read once only")
    tested = None
    if checking.validation is not None:
        tested = first_rows(checking.validation, most)
    sizes = _fitted(checking.sizes, count(rows))
    description = _description(prepared.model, rows, tested, sizes)
    key = plan_cache.key_of(f"{description} {sync}")
    known = plan_cache.read(key)
    if known is not None:
        return known, "equals Keras' own, as an earlier run has verified"
    step = untraced(prepared, checking.backend, inputs.spec, checking.seed)
    if tested is not None and count(tested) != count(rows):
        tested = None
    try:
        plan = Check(step, rows, tested, sizes, sync).run()
    except NotComparable:
        # A model may need a number of rows: that of a whole batch.
        if not isinstance(inputs, Input):
            raise
        more = first_rows(inputs, min(inputs.global_batch_size, inputs.rows))
        if more is None or count(more) == count(rows):
            raise
        plan = Check(step, more, None, _fitted(sizes, count(more)), sync).run()
    plan_cache.write(key, plan)
    return plan, "equals Keras' own, verified"


def _check_comparable(prepared: PreparedModel, backend: Backend) -> None:
    """Raises NotComparable where one process cannot run the step by itself."""
    if backend.tensor is not None:
        raise NotComparable("several ranks hold one replica")
    if prepared.placement is not None:
        raise NotComparable("its layers are on several devices")
    layers = prepared.model._flatten_layers()
    if any(getattr(layer, "quantization_mode", None) == "float8" for layer in layers):
        raise NotComparable("rounding to float8 depends on how rows are cut")
    size = sum(
        int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size
        for v in prepared.model.trainable_variables
    )
    if size > _MOST_BYTES:
        raise NotComparable(f"its gradients have {size >> 30} GiB")


def _fitted(sizes: Sequence[int], rows: int) -> list[int]:
    """The sizes in proportion for another number of rows; none is 0."""
    stops = np.round(np.cumsum(sizes) * rows / sum(sizes)).astype(int)
    return [int(n) for n in np.diff([0, *stops]) if n]


def _description(
    model: keras.Model, rows: Rows, tested: Rows | None, sizes: Sequence[int]
) -> str:
    """All that the outcome depends on, as text."""
    specs = tf.nest.map_structure(lambda t: f"{t.dtype}{t.shape}", (rows, tested or ()))
    return json.dumps(
        {
            "model": describe_model(model),
            "rows": str(specs),
            "sizes": list(sizes),
            "floatx": keras.config.floatx(),
            "versions": versions.installed(),
            "own": _own_code(),
        },
        sort_keys=True,
    )


def _own_code() -> str:
    """A hash of the code of the step, which changes more often than its version."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
