"""``--backend auto``: the backend that will sum this model's gradients fastest here.

A rule decides, at once: nobody waits for measurements who wants to train. Where several
ranks on one host have all their backends measured already, rank 0 predicts from that the
all-reduce time of this model's gradients on each backend (``measurements``), and chooses.

``COLLECTIVE_PROBE`` has them measured: once each, in a separate job on the same ranks
(``probe``), so that a backend that crashes or hangs does not take this job with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from collective import python_command
from collective.backends import launching
from collective.backends.auto import measurements
from collective.backends.auto.measurements import Found, Point, fit
from collective.backends.base import Backend
from collective.backends.devices import gpus, tensorflow_has_started
from collective.backends.horovod import installed
from collective.backends.horovod.backend import HorovodBackend
from collective.backends.mpi import MPIBackend
from collective.backends.native import NativeBackend
from collective.backends.options import Options
from collective.backends.registry import BACKENDS, options_of, set_options
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.backends.world import CoreWorld, can_serve
from collective.environment import Environment
from collective.environment.gpus import are_shared

# Sizes in bytes of the tensors that a step sums, or a function that returns them.
Gradients = Sequence[int] | Callable[[], Sequence[int]] | None
UNKNOWN = (4 << 20,)
SWITCH = "COLLECTIVE_PROBE"
MEASURE, AGAIN, NEVER = "1", "again", "0"
PROBE_SECONDS = 50  # below the 60 after which waiting ranks report a stall
FORK_SECONDS = 3  # to make the model for its sizes, before training starts


@dataclass(frozen=True)
class Choice:
    """The backend that ``auto`` takes here, and why."""

    name: str
    because: str
    # By backend, fastest first: seconds of a step's all-reduce, where it was measured.
    predicted: dict[str, float] = field(default_factory=dict)


def choose(
    environment: Environment, options: Options, gradients: Gradients = None
) -> Choice:
    """Chooses, the same on every rank. Every rank calls it.

    Args:
        options: Only backends that take them are candidates.
        gradients: A function is called on rank 0 only, in a fork.

    Raises:
        CollectiveError: A rank did not join.
    """
    rule = by_rule(environment.current, options)
    named = rule.name == HorovodBackend.name  # the user typed horovodrun
    alone = environment.size == 1 or environment.joining
    # The ranks of an elastic job may die while they choose, and newcomers take the rule.
    alone |= options.min_np is not None or options.max_np is not None
    if alone or named or not can_serve(environment):
        return rule
    import collective

    joined = collective.is_initialized()
    world = CoreWorld(environment)
    cores = sorted(set().union(*world.allgather(os.sched_getaffinity(0))))
    steps = _choosing(rule, environment, options, gradients, cores)
    chosen = None
    while chosen is None:  # one round for each probe, so that no rank waits for long
        mine = next(steps) if environment.rank == 0 else None
        chosen = world.allgather(mine)[0]
    if not joined and chosen.name != NativeBackend.name:
        collective.shutdown()
    return chosen


def by_rule(environment: Environment, options: Options) -> Choice:
    """The choice by launcher and devices alone."""
    if environment.launched:
        started = f"{environment.launcher} started {environment.size} processes"
        if environment.launcher == "horovodrun":
            horovod = HorovodBackend.availability(environment)
            if horovod.usable:
                return Choice("horovod", started)
            started += f"; horovod: {horovod.reason}"
        if on_gpus := _on_gpus(environment, options):
            return Choice(on_gpus, f"{started}, each with a GPU: NCCL sums on them")
        native = NativeBackend.availability(environment)
        if native.usable:
            return Choice("native", started)
        because = f"{started}; native: {native.reason}"
        mpi = MPIBackend.availability(environment)
        if not mpi.usable and MultiWorkerBackend.availability(environment).usable:
            return Choice("tf-multiworker", f"{because}; mpi: {mpi.reason}")
        return Choice("mpi", because)
    devices = options.devices or gpus()
    if devices > 1 and options.model_parallel == 1:
        return Choice("tf-mirrored", f"{devices} devices in one process")
    return Choice("single", "one process with one device")


def _on_gpus(environment: Environment, options: Options) -> str | None:
    """The backend that sums on GPUs, where each rank has one; None: none can.

    Every other process backend copies gradients to the host and back.
    """
    if not gpus() or are_shared(environment):
        return None  # NCCL refuses two ranks on one GPU

    def fits(kind: type[Backend]) -> bool:
        takes_all = set_options(options) <= options_of(kind.name)
        return takes_all and kind.availability(environment).usable

    # The first must be made before TensorFlow starts.
    if not tensorflow_has_started() and fits(MultiWorkerBackend):
        return MultiWorkerBackend.name
    if fits(HorovodBackend) and installed.has_nccl():
        return HorovodBackend.name
    return None


def candidates(environment: Environment, options: Options) -> list[str]:
    """The backends that launched ranks can choose from."""
    found = [
        name
        for name, kind in BACKENDS.items()
        if kind.launcher
        and kind.synchronous
        and kind.availability(environment).usable
        and set_options(options) <= options_of(name)
    ]
    if tensorflow_has_started() and MultiWorkerBackend.name in found:
        found.remove(MultiWorkerBackend.name)  # it must be made before that
    return found


def _choosing(
    rule: Choice,
    environment: Environment,
    options: Options,
    gradients: Gradients,
    cores: Sequence[int],
) -> Iterator[Choice | None]:
    """Rank 0: yields None after each probe, then the choice. Raises nothing."""
    try:
        names = candidates(environment, options)
        switch = os.environ.get(SWITCH)
        if len(names) < 2 or switch == NEVER:
            yield rule
            return
        cache = measurements.ProbeCache(measurements.job(environment))
        found: dict[str, Found] = {} if switch == AGAIN else {**cache.read()}
        missing = [name for name in names if name not in found]
        if missing and switch not in (MEASURE, AGAIN):
            yield Choice(rule.name, f"{rule.because}; {SWITCH}={MEASURE} measures")
            return
        sizes, of = _sizes(gradients)
        for number, name in enumerate(missing, 1):
            place = f"on {environment.size} ranks, {number} of {len(missing)}"
            _report(f"auto: timing {name} {place}")
            found[name] = time(name, environment, cores)
            kept = cache.write(found)
            yield None
        if missing:
            how = "are kept" if kept else f"cannot be kept in {cache.path.parent}"
            _report(f"auto: measurements {how} for next time")
        found = {name: found[name] for name in names}
        choice = fastest(found, sizes)
        if choice is None:
            choice = Choice(rule.name, f"{rule.because}; every probe failed")
        _report(table(choice, found, of))
        yield choice
    except Exception as error:  # the other ranks wait for the choice
        first = str(error).split("\n")[0]
        why = f"{rule.because}; not measured: {type(error).__name__}: {first}"
        yield Choice(rule.name, why)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fastest(found: Mapping[str, Found], sizes: Sequence[int]) -> Choice | None:
    """The backend with the shortest predicted all-reduce; None where none is measured.

    Args:
        sizes: Bytes of each tensor of a step's all-reduce.
    """
    predicted = {
        name: fit(points).seconds(sizes)
        for name, points in found.items()
        if not isinstance(points, str)
    }
    if not predicted:
        return None
    order = sorted(predicted, key=lambda name: predicted[name])
    because = f"predicted all-reduce {1e3 * predicted[order[0]]:.3g} ms"
    if len(order) > 1:
        because += f"; {order[1]} {1e3 * predicted[order[1]]:.3g} ms"
    return Choice(order[0], because, {name: predicted[name] for name in order})


def time(name: str, environment: Environment, cores: Sequence[int]) -> Found:
    """Times a backend in a separate job on this host, whose ranks share the cores."""
    with tempfile.TemporaryDirectory(prefix="collective-probe-") as folder:
        path = Path(folder, "points.json")
        deadline = ["--deadline", str(PROBE_SECONDS)]
        probe = "collective.backends.auto.probe"
        program = python_command.arguments(probe, str(path), *deadline)
        launcher = environment.launcher
        if launcher not in ("mpirun", "horovodrun", "collectiverun"):
            launcher = BACKENDS[name].launcher
        variables = launching.environment(launching.unlaunched(os.environ))
        line = launching.line(name, environment.size, program, launcher)
        ended = launching.run(line, PROBE_SECONDS, variables, cores)
        if ended.failure:
            return ended.failure
        return [Point(**point) for point in json.loads(path.read_text())]


def _sizes(gradients: Gradients) -> tuple[Sequence[int], str]:
    """Bytes of each tensor of a step's all-reduce, and a description of them."""
    sizes = gradients
    if callable(sizes):
        started = tensorflow_has_started()
        sizes = None if started else in_a_fork(sizes, FORK_SECONDS)
    if not sizes:
        return UNKNOWN, f"{UNKNOWN[0] >> 20} MiB (this model's size is not known yet)"
    number = f"{len(sizes)} tensor{'s' * (len(sizes) > 1)}"
    return sizes, f"{sum(sizes) / 2**20:.3g} MiB in {number}"


def table(choice: Choice, found: Mapping[str, Found], of: str) -> str:
    """The choice as text, one line for each candidate."""
    lines = [f"auto: predicted all-reduce of a step, {of}:"]
    for name, seconds in choice.predicted.items():
        points = found[name]
        assert not isinstance(points, str)
        line = fit(points)
        rate = f"{1e-9 / line.per_byte:.2f} GB/s" if line.per_byte else "any size alike"
        chosen = "  <- chosen" if name == choice.name else ""
        lines.append(
            f"  {name:<15}{1e3 * seconds:>10.3f} ms   "
            f"({1e6 * line.latency:.0f} µs, {1e6 * line.each:.1f} µs a tensor, {rate})"
            f"{chosen}"
        )
    for name, failure in found.items():
        if isinstance(failure, str):
            lines.append(
                f"  {name:<15}{failure}; {SWITCH}={MEASURE} tries it again "
                f"(HINT: {SWITCH}=0 uses no measurement)"
            )
    return "\n".join(lines)


def in_a_fork(function: Callable[[], Any], seconds: float) -> Any | None:
    """Calls a function in a fork of this process.

    Only for a process whose TensorFlow has not started: a fork has none of its threads.

    Args:
        function: Its result must be picklable. Nothing it prints is seen.
        seconds: Its deadline.

    Returns:
        Its result; None if it raised, crashed or did not end in time.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, writer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of NumPy's BLAS
        child.start()
    writer.close()
    try:
        return reader.recv() if reader.poll(seconds) else None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()


def _answer(function: Callable[[], Any], writer: Connection) -> None:
    """The fork: calls the function, silently, and sends the result."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    writer.send(function())
