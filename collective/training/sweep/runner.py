"""Trains many independent models, as many at a time as the machine has room for.

Each is trained in processes of its own on the devices and cores of one group, as
``train.py`` does alone. Groups share nothing: a failed training ends no other one, and
each result is that of the training alone.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import queue
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from collective import python_command
from collective.backends import Options, launching
from collective.backends.devices import gpus
from collective.backends.launching import run
from collective.backends.registry import BACKENDS
from collective.backends.registry import ranks as ranks_of
from collective.environment import Environment, detect
from collective.environment.gpus import granted
from collective.errors import UsageError

EXCLUDED_OPTIONS = ("options", "test", "verbose", "timeline")


@dataclass(frozen=True)
class Trained:
    """The outcome of one of many trainings.

    Attributes:
        name: Name of the training; the folder holds ``NAME.json``, its summary, and
            ``NAME.log``, the end of its output.
        options: Its options.
        summary: The content of ``NAME.json``; None if it failed.
        failure: Why it failed, in a few words; empty if it succeeded.
    """

    name: str
    options: Mapping[str, Any]
    summary: dict[str, Any] | None
    failure: str


def fit_many(
    trainings: Sequence[Mapping[str, Any]],
    *,
    folder: str | os.PathLike[str],
    at_once: int | None = None,
    ranks: int = 1,
    tell: Callable[[str], None] = print,
) -> list[Trained]:
    """Trains many independent models.

    Args:
        trainings: For each training the options of ``train.py`` with their Python names
            (``learning_rate``), and ``name``, by default its number. A model or data of
            your own is ``module:function``.
        folder: For the summary and log of each.
        at_once: Trainings that run at a time; the others wait in a queue. By default as
            many as there are groups of ``ranks`` GPUs, or of cores without a GPU.
        ranks: Processes that train one model together.
        tell: Called with a line when a training starts or ends.

    Returns:
        The outcomes, in the order of ``trainings``.

    Raises:
        UsageError: If an option is unknown, has a wrong value, or does not fit.
    """
    if detect().size > 1:
        raise UsageError(
            "a sweep starts its own processes, but a launcher has started several",
            hint="python train.py --sweep FILE, without a launcher; ranks: 2 in the "
            "file trains each model on two",
        )
    jobs = [_checked(options) for options in trainings]
    for name in {job.get("backend", "auto") for job in jobs}:
        _check_backend(name, ranks)
    names = [str(t.get("name", i)) for i, t in enumerate(trainings)]
    for name in names:
        if names.count(name) > 1 or name != Path(name).name:
            raise UsageError(
                f"{name!r} names two trainings, or is not a file name",
                hint="give each training a name of its own",
            )
    groups = _groups(at_once, ranks, len(jobs))
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{place} cannot be created: {error.strerror}", hint="another folder"
        ) from None
    free: queue.SimpleQueue[tuple[list[int], str | None]] = queue.SimpleQueue()
    for group in groups:
        free.put(group)

    def work(number: int) -> tuple[int, Trained]:
        name, group = names[number], free.get()
        tell(f"{name}: begins")
        failure, summary = _train(jobs[number], place / name, ranks, *group)
        tell(f"{name}: {failure or 'done'}")
        free.put(group)
        return number, Trained(name, trainings[number], summary, failure)

    # Its threads end when this process is interrupted, and their runs with them.
    with ThreadPool(max(1, len(groups))) as pool:
        found = dict(pool.imap_unordered(work, range(len(jobs))))
    return [found[number] for number in range(len(jobs))]


def known_options() -> dict[str, Any]:
    """Returns the options of a training and their types."""
    from collective.training.command import Job

    kinds = typing.get_type_hints(Job) | typing.get_type_hints(Options)
    return {k: kind for k, kind in kinds.items() if k not in EXCLUDED_OPTIONS}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without ``name``, converted to their types."""
    kinds, values = known_options(), {}
    for key, value in options.items():
        if key == "name":
            continue
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, 1)
            raise UsageError(
                f"unknown option {key!r} of a training",
                hint=f"{near[0]}?" if near else "python train.py --help",
            )
        kind = typing.get_args(kinds[key]) or (kinds[key],)
        if float in kind and isinstance(value, str | int):
            with contextlib.suppress(ValueError):
                value = float(value)  # YAML reads 1e-3 as a string
        if not any(type(value) is k for k in kind):
            raise UsageError(
                f"{key}: {value!r} is not {kind[0].__name__}",
                hint=f"{key.replace('_', '-')}: see python train.py --help",
            )
        values[key] = value
    return values


def _check_backend(name: str, ranks: int) -> None:
    if name == "auto":
        return
    if name not in BACKENDS:
        raise UsageError(
            f"unknown backend {name!r}", hint=f"backend: {' | '.join(BACKENDS)}"
        )
    kind, place = BACKENDS[name], Environment()
    if ranks > 1:
        size = ranks_of(name, ranks)
        place = Environment(_launcher(name), 0, size, 0, size)
    found = kind.availability(place)
    if not found.usable:
        raise UsageError(
            f"backend {name!r} cannot be used with ranks: {ranks}: {found.reason}",
            hint="another backend, or another number of ranks",
        )


def _launcher(backend: str) -> str:
    kind = BACKENDS.get(backend)
    return (kind and kind.launcher) or "collectiverun"


def _groups(
    at_once: int | None, ranks: int, jobs: int
) -> list[tuple[list[int], str | None]]:
    """Returns the cores and visible GPUs of each group; None without GPUs."""
    if ranks < 1 or (at_once is not None and at_once < 1):
        raise UsageError("at_once and ranks must be at least 1", hint="at_once: 1")
    cores = sorted(os.sched_getaffinity(0))
    devices = granted() if gpus() else []
    room = max(1, len(devices or cores) // ranks)
    at_once = min(room if at_once is None else at_once, jobs)
    if devices and at_once * ranks > len(devices):
        raise UsageError(
            f"{at_once} trainings at once on {ranks} GPUs each need more than the "
            f"{len(devices)} GPUs of this machine",
            hint=f"at_once: {room}",
        )
    groups: list[tuple[list[int], str | None]] = []
    for group in range(at_once):
        own = cores[group * len(cores) // at_once : (group + 1) * len(cores) // at_once]
        mine = devices[group * ranks : (group + 1) * ranks]
        groups.append((own, ",".join(mine) if devices else None))
    return groups


def _train(
    job: dict[str, Any], path: Path, ranks: int, cores: list[int], devices: str | None
) -> tuple[str, dict[str, Any] | None]:
    """Trains one model; returns why it failed (or '') and its summary."""
    summary = path.with_name(f"{path.name}.json")
    summary.unlink(missing_ok=True)
    backend = job.get("backend", "auto")
    worker = "collective.training.sweep.worker"
    program = python_command.arguments(worker, json.dumps(job), str(summary))
    launcher = _launcher(backend) if ranks > 1 else ""
    variables = launching.environment(launching.unlaunched(os.environ))
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = devices
    command = [sys.executable, *program]
    if launcher:
        command = launching.line(backend, ranks, program, launcher)[:-2]
    ended = run(command, math.inf, variables, cores)
    path.with_name(f"{path.name}.log").write_text(ended.tail + "\n")
    if ended.failure:
        errors = [s for s in ended.tail.splitlines() if "error: " in s]
        return errors[0].split("error: ")[1] if errors else ended.failure, None
    return "", json.loads(summary.read_text())
