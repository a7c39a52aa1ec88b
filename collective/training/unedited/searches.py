"""Searches of KerasTuner and AutoKeras: every rank makes the same trials, together.

Every rank runs the search of the script, and each trial trains on all ranks. Every rank has
an oracle of its own; all of them take rank 0's proposals and the metrics that rank 0 has
measured, so they stay alike, whatever a trial measures. Rank 0 alone writes and removes files
of the search, while the others wait, so that each may read them. A search is continued from
its folder, as by Keras' own means.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from collective.errors import CollectiveError, UsageError
from collective.import_hook import after_import
from collective.training.process.object_collectives import broadcast_object
from collective.training.unedited.script_job import SEARCH, ScriptJob

_TUNER = "keras_tuner.src.engine.base_tuner"  # AutoKeras' tuners are of its class, too
_AUTOKERAS_FILES = "autokeras.utils.io_utils"


def share_searches(job: ScriptJob) -> None:
    """Have all ranks search together once the script has imported a tuner."""
    job.enter(after_import(_TUNER, functools.partial(_share, job)))
    if not job.by_strategy:
        job.enter(after_import(_AUTOKERAS_FILES, functools.partial(_write_once, job)))


def _share(job: ScriptJob, module: ModuleType) -> None:
    tuner = module.BaseTuner
    if job.by_strategy:
        job.replace(tuner, "search", functools.partial(_refuse, job))
        return
    _write_once(job, module.utils)
    files = module.backend.io
    job.replace(files, "rmtree", _removing(job, files.rmtree))
    job.replace(tuner, "__init__", _making(job, tuner.__init__))
    _raise_our_errors(job, tuner)


def _refuse(job: ScriptJob, *_: Any, **__: Any) -> None:
    raise UsageError(
        f"backend {job.backend.name!r} cannot search with KerasTuner: its strategy runs "
        "callbacks on rank 0 only",
        hint="--backend native, or mpi",
    )


def _write_once(job: ScriptJob, module: ModuleType) -> None:
    """Have rank 0 write the files of a search, and the others wait for each."""
    stock = module.save_json

    @functools.wraps(stock)
    def save_json(path: Any, obj: Any) -> Any:
        if job.inside:
            return stock(path, obj)
        return job.write(os.path.abspath(path), lambda: stock(path, obj))

    job.replace(module, "save_json", save_json)


def _removing(job: ScriptJob, stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Have rank 0 remove the folder of an earlier search, once no rank reads it."""

    @functools.wraps(stock)
    def rmtree(path: Any) -> None:
        job.remove([os.path.abspath(path)], lambda: stock(path))

    return rmtree


def _making(job: ScriptJob, stock: Callable[..., None]) -> Callable[..., None]:
    """Have the oracle of each tuner follow rank 0's."""

    @functools.wraps(stock)
    def make(self: Any, oracle: Any, *args: Any, **kwargs: Any) -> None:
        _check_record(job)
        stock(self, oracle, *args, **kwargs)
        propose, report = oracle.populate_space, oracle.update_trial

        @functools.wraps(propose)
        def populate_space(trial_id: str) -> Any:
            return _of_rank_zero(job, propose(trial_id))

        @functools.wraps(report)
        def update_trial(trial_id: str, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            return report(trial_id, _of_rank_zero(job, metrics), *args, **kwargs)

        oracle.populate_space, oracle.update_trial = populate_space, update_trial

    return make


def _check_record(job: ScriptJob) -> None:
    """Refuse to answer a search from a record: its folder has gone on meanwhile."""
    why = "a search of KerasTuner continues from its own folder"
    if job.folder is not None:
        raise UsageError(
            f"the script cannot be resumed: {why}",
            hint="leave out --resume: the same line again continues the search, if the "
            "script does not say overwrite=True",
        )
    job.units.growth.check_replayed(why)


def _of_rank_zero(job: ScriptJob, mine: Any) -> Any:
    """Return rank 0's value on every rank."""
    if job.inside or job.undone:
        return mine

    def attempt() -> Any:
        with job.calling(SEARCH):
            return broadcast_object(job.backend, mine)

    return job.units.run(attempt, SEARCH)


def _raise_our_errors(job: ScriptJob, tuner: Any) -> None:
    """Have a search end with errors of the job, which are none of a trial.

    A tuner takes any exception for the failure of a trial, and begins the next.
    """
    run, attempt = tuner._run_and_update_trial, tuner._try_run_and_update_trial
    raised: list[CollectiveError] = []

    @functools.wraps(run)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except CollectiveError as error:
            raised.append(error)
            raise

    @functools.wraps(attempt)
    def raising(*args: Any, **kwargs: Any) -> Any:
        result = attempt(*args, **kwargs)
        if raised:
            raise raised.pop()
        return result

    job.replace(tuner, "_run_and_update_trial", noting)
    job.replace(tuner, "_try_run_and_update_trial", raising)
