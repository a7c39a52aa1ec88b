"""``verify_step``: rank 0 checks the step, and every rank gets its plan or its error.

Plans are kept by a digest of all they depend on: in this process, and in the user's cache
folder for the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError, UsageError
from collective.launch import versions
from collective.log import log
from collective.net import private_files
from collective.training import exchange
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.prepared import PreparedModel
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows
from collective.training.variants.virtual.pieces import VirtualReplicas
from collective.training.verification.check import Check, NotComparable
from collective.training.verification.descriptions import describe_model
from collective.training.verification.first_rows import count, first_rows
from collective.training.verification.pieces import UntracedStep

VARIABLE = "COLLECTIVE_VERIFY"
_known: dict[str, StepPlan] = {}
# Rows that are compared, and how they are cut: unevenly, so that a mean of means differs
# from the mean.
_ROWS, _PIECES = 7, (4, 2, 1)
# Gradients of Keras' step and of ours are in memory at once, beside those of the training.
_MOST_BYTES = 2 << 30


def is_wanted(enabled: bool = True) -> bool:
    """Whether steps are compared; that of rank 0 counts."""
    return enabled and os.environ.get(VARIABLE) != "0"


def verify_step(
    prepared: PreparedModel,
    backend: Backend,
    inputs: Input | Batches,
    validation: Input | Batches | None = None,
    *,
    accumulate: int = 1,
    seed: int | None = None,
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
        inputs: What will be trained on; where it is no ``Input``, it has ``spec``.
        enabled: False: nothing is done. So it is with ``COLLECTIVE_VERIFY=0``. That of
            rank 0 counts.
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
    plan, line, refusal = StepPlan(), None, None
    if backend.rank == 0 and is_wanted(enabled):
        replicas = virtual.count if virtual else backend.most_replicas
        cut = accumulate > 1 or replicas > 1
        sizes = pieces or (_PIECES if cut else (_ROWS,))
        start = time.perf_counter()
        with backend.only_rank_zero("the comparison with Keras' own step"):
            try:
                plan, how = _plan(
                    prepared, backend, inputs, validation, sizes, seed, sync_batch_norm
                )
            except NotComparable as why:
                first = str(why).strip().split("\n")[0]
                how = f"could not be compared with Keras' own: {first}"
            except UsageError as error:
                how, refusal = "", (error.message, error.hint)
        line = f"the step {how} ({time.perf_counter() - start:.1f} s)"
    if backend.size > 1:
        plan, line, refusal = exchange.broadcast_object(backend, (plan, line, refusal))
    if refusal is not None:
        raise UsageError(refusal[0], hint=refusal[1])
    if backend.rank == 0 and line is not None and str(verbose) != "0":
        for text in (*plan.notes, line):
            log.info(text)
    return plan


def _plan(
    prepared: PreparedModel,
    backend: Backend,
    inputs: Input | Batches,
    validation: Input | Batches | None,
    sizes: Sequence[int],
    seed: int | None,
    sync_batch_norm: bool,
) -> tuple[StepPlan, str]:
    """The plan, and how it was found; on rank 0."""
    _check_comparable(prepared, backend)
    rows = first_rows(inputs, sum(sizes))
    if rows is None:
        raise NotComparable("its data are no plain tensors, or can be read once only")
    tested = None if validation is None else first_rows(validation, sum(sizes))
    sizes = _fitted(sizes, count(rows))
    description = _description(prepared.model, rows, tested, sizes)
    text = f"{description} {sync_batch_norm}"
    key = hashlib.sha256(text.encode()).hexdigest()
    known = _read(key)
    if known is not None:
        return known, "equals Keras' own, as an earlier run has verified"
    step = UntracedStep(prepared, backend, inputs.spec, seed=seed)
    if tested is not None and count(tested) != count(rows):
        tested = None
    try:
        plan = Check(step, rows, tested, sizes, sync_batch_norm).run()
    except NotComparable:
        # A model may need a number of rows: that of a whole batch.
        if not isinstance(inputs, Input):
            raise
        more = first_rows(inputs, min(inputs.global_batch_size, inputs.rows))
        if more is None or count(more) == count(rows):
            raise
        sizes = _fitted(sizes, count(more))
        plan = Check(step, more, None, sizes, sync_batch_norm).run()
    _write(key, plan)
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


def _path(key: str) -> Path:
    return private_files.cache_folder() / "verified" / f"{key[:32]}.json"


def _read(key: str) -> StepPlan | None:
    """The plan, if this step was verified before."""
    if key in _known:
        return _known[key]
    try:
        kept = json.loads(private_files.read(_path(key)))
        if kept["key"] != key:
            return None
        return StepPlan(
            bool(kept["gather_loss"]),
            bool(kept["gather_metrics"]),
            tuple(map(str, kept["notes"])),
            tuple((int(place), int(number)) for place, number in kept["look_ups"]),
        )
    except (OSError, ValueError, KeyError, TypeError, CollectiveError):
        return None


def _write(key: str, plan: StepPlan) -> None:
    """Keeps a plan; on disk too, where that is possible."""
    _known[key] = plan
    kept = {"key": key} | asdict(plan)
    path = _path(key)
    part = path.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError, CollectiveError):
        private_files.folder(private_files.cache_folder())
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        private_files.write(part, json.dumps(kept, indent=1).encode())
        part.replace(path)
