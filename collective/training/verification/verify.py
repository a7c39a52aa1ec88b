"""``verify_step``: rank 0 checks the step, and every rank gets its plan or its error.

Plans are kept by a digest of all they depend on: in this process, and in the user's cache
folder for the next one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.errors import CollectiveError, UsageError, first_line
from collective.launch import versions
from collective.log import log
from collective.net import private_files
from collective.training import compatibility, exchange, host_random, keras_compat
from collective.training.input.batches import Batches
from collective.training.input.pipeline import Input
from collective.training.prepared import PreparedModel
from collective.training.step.draws import Draws
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows
from collective.training.verification import stock_models
from collective.training.verification.check import Check, NotComparable
from collective.training.verification.descriptions import describe_model
from collective.training.verification.first_rows import (
    compared_rows,
    count,
    fewer,
    first_batches,
    is_large,
)
from collective.training.verification.graph import Traced, kind_of_rows
from collective.training.verification.pieces import Untraced
from collective.training.verification.settings import describe_settings, exact_products
from collective.training.virtual.pieces import VirtualReplicas

VARIABLE = "COLLECTIVE_VERIFY"
_known: dict[str, StepPlan] = {}
_tested: WeakKeyDictionary[keras.Model, dict[Any, StepPlan]] = WeakKeyDictionary()
# Where several replicas or micro-batches share a batch.
_PIECES = 3
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
    pieces: int | None = None,
    virtual: VirtualReplicas | None = None,
) -> StepPlan:
    """Compares our step with Keras' own before it trains; every rank calls it.

    Rank 0 computes loss, gradients, metrics, state and the updated weights on rows of the
    first two batches twice: by Keras' own step at once, and by ours in pieces as replicas
    would. No variable is changed.

    Args:
        enabled: False: nothing is done. So it is with ``COLLECTIVE_VERIFY=0``. That of
            rank 0 counts.
        pieces: Into how many the rows are cut; by default into several where replicas or
            micro-batches share a batch, else one.
        virtual: The virtual replicas that share a batch; None: the backend's replicas.

    Returns:
        The plan, the same on every rank.

    Raises:
        UsageError: On every rank: the step would train another model than Keras', and
            why it probably does.
    """
    replicas = virtual.count if virtual else backend.most_replicas
    if pieces is None:
        pieces = _PIECES if accumulate > 1 or replicas > 1 else 1

    def compared() -> tuple[StepPlan, str]:
        _check_comparable(prepared, backend)
        batches = _rows(inputs, prepared)
        tested = _rows(validation, prepared)[:1] if validation is not None else []
        if not batches:
            raise NotComparable("its data have no rows yet")
        draws = Draws(prepared, seed)
        if not backend.synchronous:
            draws = Draws(prepared, seed or 0, by_piece=True)
        step = Untraced(prepared, backend, draws)
        gathers = accumulate == 1 and virtual is None
        gathers = gathers and compatibility.works({"coupled"}, backend)
        own = backend.synchronous and prepared.partition is None
        own = own and getattr(backend, "strategy", None) is None
        check = Check(
            step,
            batches[:1] if is_large(prepared.model, batches[0]) else batches,
            tested[0] if tested else None,
            pieces,
            sync_batch_norm,
            updates=own and not keras_compat.expects_overflow(prepared.model.optimizer),
            gathers=gathers,
        )
        try:
            return _plan(check)
        except NotComparable:
            # A model may need a number of rows: that of a whole batch.
            if not isinstance(inputs, Input):
                raise
            whole = first_batches(inputs)[:1]
            if not whole or count(whole[0]) == count(batches[0]):
                raise
            return _plan(
                Check(step, whole, None, pieces, sync_batch_norm, gathers=gathers)
            )

    for data in (inputs, validation):
        # On every rank, whatever a generator draws from, and in Keras' order: both may be
        # one data set, which is shuffled again for each of its iterators.
        if isinstance(data, Batches) and is_wanted(enabled):
            data.first_batches()
    return _decided(backend, compared, is_wanted(enabled), "the step", verbose)


def verify_test(
    prepared: PreparedModel, backend: Backend, inputs: Input | Batches
) -> StepPlan:
    """Compares our test step with Keras' own, as ``verify_step``.

    Always in pieces: even of one replica, the results of several batches are added up.
    Once for a model as it is compiled, and a kind of data.
    """
    of_model = _tested.setdefault(prepared.model, {})
    key = repr(inputs.spec), *keras_compat.compiled_settings(prepared.model)
    if key in of_model:
        return of_model[key]

    def compared() -> tuple[StepPlan, str]:
        _check_comparable(prepared, backend)
        batches = _rows(inputs, prepared)
        if not batches:
            raise NotComparable("its data have no rows")
        gathers = compatibility.works({"coupled"}, backend)
        step = Untraced(prepared, backend)
        return _plan(Check(step, [], batches[0], _PIECES, gathers=gathers))

    if isinstance(inputs, Batches) and is_wanted():
        inputs.first_batches()
    of_model[key] = _decided(backend, compared, is_wanted(), "the evaluation", 0)
    return of_model[key]


def _rows(inputs: Input | Batches, prepared: PreparedModel) -> list[Rows]:
    """The rows to compare, of each of the first batches."""
    batches = first_batches(inputs)
    return [fewer(b, compared_rows(prepared.model, b)) for b in batches]


def _decided(
    backend: Backend,
    compared: Callable[[], tuple[StepPlan, str]],
    wanted: bool,
    what: str,
    verbose: str | int,
) -> StepPlan:
    """What rank 0 finds, on every rank; or the same error on every rank."""
    # Rank 0 decides, so that no rank waits where a variable is not set on all hosts.
    plan, line, refusal = StepPlan(), None, None
    if backend.rank == 0 and wanted:
        start = time.perf_counter()
        what_runs = "the comparison with Keras' own step"
        with (
            backend.only_rank_zero(what_runs),
            host_random.unchanged(),
            exact_products(),
        ):
            try:
                plan, how = compared()
            except NotComparable as why:
                first = first_line(why)
                how = f"could not be compared with Keras' own: {first}"
            except UsageError as error:
                how, refusal = "", (error.message, error.hint)
        line = f"{what} {how} ({time.perf_counter() - start:.1f} s)"
    if backend.size > 1:
        plan, line, refusal = exchange.broadcast_object(backend, (plan, line, refusal))
    if refusal is not None:
        raise UsageError(refusal[0], hint=refusal[1])
    if backend.rank == 0 and line is not None:
        for text in plan.notes:  # another result is said whatever verbose says
            log.warning(text)
        if "could not" in line:
            log.warning(line)
        elif str(verbose) != "0":
            log.info(line)
    return plan


def _plan(check: Check) -> tuple[StepPlan, str]:
    """The plan, and how it was found; on rank 0."""
    config = stock_models.configuration(check.model)
    traced = check.traced() if config is None else []
    text = _description(check, traced, config)
    key = hashlib.sha256(text.encode()).hexdigest() if text else ""
    known = _read(key) if key else None
    if known is not None:
        return known, "equals Keras' own, as an earlier run has verified"
    plan = check.run(traced)
    if key:
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


def _description(
    check: Check, traced: Sequence[Traced | None], config: str | None
) -> str:
    """All that the outcome depends on, as text; none where that cannot be known."""
    digests = [found.digest if found else None for found in traced]
    if None in digests:
        return ""
    rows = [*check.batches, *([] if check.validation is None else [check.validation])]
    return json.dumps(
        {
            "graphs": digests,
            "model": config or describe_model(check.model),
            "rounding": check.tolerance,
            "rows": [kind_of_rows(part) for part in rows],
            "numbers": [count(part) for part in rows],
            "pieces": [check.pieces, check.sync_batch_norm, check.updates],
            "settings": describe_settings(),
            "versions": versions.installed(),
            "own": _own_code(),
        },
        sort_keys=True,
    )


@functools.cache
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
            added_sums=tuple(map(int, kept["added_sums"])),
            whole_layers=tuple(map(int, kept["whole_layers"])),
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
