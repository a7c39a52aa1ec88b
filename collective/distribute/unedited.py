"""``collective.distribute_keras``: one line, and the Keras of a script is distributed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from collective import backends, streams
from collective.backends.base import Backend
from collective.backends.capabilities import Elastic
from collective.backends.factory import check_unedited
from collective.backends.registry import BACKENDS
from collective.distribute import script_strategies
from collective.environment import detect
from collective.errors import UsageError
from collective.fit_options import check_names
from collective.training import keras_compat
from collective.training.calls.opening import with_threads
from collective.training.calls.set_options import check_settable
from collective.training.unedited import notice
from collective.training.unedited.calls import distribute_calls
from collective.training.unedited.checkpoints import replace_checkpoint_writer
from collective.training.unedited.dry_run import DryRun
from collective.training.unedited.files import (
    replace_cache,
    replace_mkdir,
    replace_savers,
)
from collective.training.unedited.keras_distribution.held_models import hold_models
from collective.training.unedited.keras_distribution.job_devices import (
    replace_keras_distribution,
)
from collective.training.unedited.loops import distribute_loops
from collective.training.unedited.private_files import keep_writes_private
from collective.training.unedited.removals import replace_removals
from collective.training.unedited.resume import StateFolder, identify
from collective.training.unedited.script_job import ScriptJob
from collective.training.unedited.searches import share_searches
from collective.training.unedited.seeds import seed_all_ranks
from collective.training.unedited.standard_input import replace_stdin
from collective.training.unedited.temporary_folders import (
    postpone_removals_of_folders,
)
from collective.training.unedited.tracking import record_on_rank_zero

OUTPUTS = ("rank0", "all")
_distribution: Distribution | None = None


class Distribution:
    """Keras as it is while a script is distributed."""

    def __init__(
        self,
        backend: Backend,
        options: Mapping[str, Any],
        loops: bool = False,
        takes_over: Sequence[Callable[[], None]] = (),
        former: Sequence[int] | None = None,
        folder: StateFolder | None = None,
        dry_run: bool = False,
    ):
        self.job = job = ScriptJob(backend, folder)
        job.takes_over += takes_over
        if former is not None:
            job.units.join(former)
        else:
            job.units.resume()
        seed_all_ranks(job, options.get("seed"))  # may refuse; nothing is replaced then
        hold_models(job, options)
        distribute_calls(job, options, DryRun(backend) if dry_run else None)
        script_strategies.replace_strategies(job)
        replace_keras_distribution(job)
        if hasattr(backend, "strategy"):
            notice.refuse_gradients(job)
        if job.is_shared:
            if loops:
                distribute_loops(job)
                notice.warn_of_gradients(job)
            else:
                notice.warn_of_updates(job)
            replace_savers(job)
            replace_checkpoint_writer(job)
            replace_mkdir(job)
            replace_removals(job)
            postpone_removals_of_folders(job)
            replace_stdin(job)
            if not job.by_strategy:
                keep_writes_private(job)
            replace_cache(job)
            job.enter(keras_compat.random_pipelines.drawing_in_order())
            job.enter(keras_compat.random_pipelines.keeping_order())
            share_searches(job)
        script_strategies.use_by_default(getattr(backend, "strategy", None))

    def undo(self) -> None:
        """Make Keras what it was before."""
        global _distribution
        self.job.undo()
        script_strategies.use_by_default(None)
        if _distribution is self:
            _distribution = None


def distribute_keras(
    backend: str | Backend = "auto",
    *,
    options: backends.Options | None = None,
    output: str = OUTPUTS[0],
    loops: bool = False,
    resume: str | None = None,
    dry_run: bool = False,
    **fit_options: Any,
) -> Distribution:
    """Make ``fit``, ``evaluate`` and ``predict`` of Keras models run on all ranks.

    Every rank calls it, before it makes a model. ``collectiverun --keras script.py`` does
    so for a script that does not. A second call changes nothing.

    Args:
        backend: A name (``python -m collective.backends`` lists them) or a backend.
        options: Devices, threads and more of the backend.
        output: ``rank0``: other ranks print nothing to stdout; ``all``.
        loops: Whether steps of the script's own training loops run on each rank's rows
            of their batch (``docs/how-to/loops.md``).
        resume: A folder where the state of the script is kept while it runs, and from
            which it continues if it has one (``docs/how-to/unedited-scripts.md``).
        dry_run: Whether the script ends before its first training step, and says what
            that would hold in memory and send (``docs/how-to/memory.md``).
        **fit_options: Arguments of ``collective.fit`` that Keras has not, for each fit:
            ``accumulate``, ``verify``, ...; or ``tensor_parallel=T`` of the backend.

    Returns:
        What undoes it.

    Raises:
        UsageError: The backend cannot be used here, or cannot run such a script.
    """
    global _distribution
    if _distribution is not None:
        return _distribution
    _check(backend, output, fit_options)
    parts = fit_options.pop("tensor_parallel", None)
    if parts is not None and not isinstance(backend, str):
        raise UsageError(
            "tensor_parallel is an option of the backend, which is there already",
            hint="collective.backends.Options(tensor_parallel=2) when it is made",
        )
    if parts is not None:
        options = replace(options or backends.Options(), tensor_parallel=parts)
    if isinstance(backend, str):
        virtual = fit_options.get("virtual_replicas") is not None
        backend = backends.get(backend, with_threads(options) if virtual else options)
    _check_elastic(backend, loops)
    former = backend.enter() if isinstance(backend, Elastic) and backend.joins else None
    takes_over = [record_on_rank_zero(backend.rank)]
    if backend.rank and output == OUTPUTS[0]:
        takes_over.append(_silence())
    folder = None
    if resume:
        _check_resumable(backend, loops)
        folder = StateFolder(resume, identify(sys.argv[0], sys.argv[1:]))
        if backend.rank:
            takes_over.append(folder.open)
    _distribution = Distribution(
        backend, fit_options, loops, takes_over, former, folder, dry_run
    )
    return _distribution


def _silence() -> Callable[[], None]:
    """Discard what this process writes to its standard output; return what ends it.

    The file descriptor is replaced: libraries and child processes are silent, too.
    """
    streams.flush()
    nowhere, screen = os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.dup2(nowhere, 1)
    os.close(nowhere)

    def end() -> None:
        streams.flush()
        os.dup2(screen, 1)
        os.close(screen)

    return end


def _check(backend: str | Backend, output: str, fit_options: Mapping[str, Any]) -> None:
    """Refuse what cannot work, before anything starts."""
    if output not in OUTPUTS:
        raise UsageError(f"unknown output {output!r}", hint=" | ".join(OUTPUTS))
    check_names(fit_options)
    check_settable(fit_options)
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise UsageError(
            "TF_USE_LEGACY_KERAS asks for Keras 2, and only Keras 3 can be distributed",
            hint="unset TF_USE_LEGACY_KERAS",
        )
    kind = BACKENDS.get(backend) if isinstance(backend, str) else type(backend)
    if kind is not None:
        check_unedited(kind, detect().size)


def _check_resumable(backend: Backend, loops: bool) -> None:
    """Refuse what a script cannot be resumed with."""
    if loops or hasattr(backend, "strategy"):
        what = "--loops" if loops else f"backend {backend.name!r}"
        raise UsageError(
            f"--resume does not work with {what}: its steps cannot be answered from a "
            "record",
            hint="leave one of them out; keras.callbacks.BackupAndRestore in the script "
            "resumes after an epoch",
        )


def _check_elastic(backend: Backend, loops: bool) -> None:
    """Refuse what an elastic job cannot do."""
    admits = isinstance(backend, Elastic) and type(backend).enter is not Elastic.enter
    if detect().joining and not (admits and backend.elastic):
        raise UsageError(
            f"ranks cannot join a job of backend {backend.name!r}",
            hint="--backend native; or drop --max-np",
            everywhere=False,
        )
    if backend.elastic and loops:
        raise UsageError(
            "--loops does not work with an elastic job (--min-np): what a step has changed "
            "in the script itself would have to be undone before it is made again",
            hint="drop --min-np, and continue from a checkpoint of the script's own",
        )
