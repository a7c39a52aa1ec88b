"""The runs of a comparison, one after the other, and their records."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from collective import python_command
from collective.backends.registry import BACKENDS, can_start
from collective.comparison import launching
from collective.comparison.equality import TOLERANCE, Recorded, judge, judge_bits
from collective.comparison.launching import CompletedRun, run
from collective.comparison.results import EqualityProof, Results
from collective.comparison.speed import Timed
from collective.errors import UsageError

REFERENCE = "single"
SHARE = "one share"
# Runs of one replica, for any number of replicas in the other runs.
ALONE = (SHARE, *(name for name, kind in BACKENDS.items() if kind.one_replica))
PROOF_STEPS = 30


@dataclass(frozen=True)
class ComparisonOptions:
    """The options of a comparison."""

    # Numbers of replicas, ascending; equality is tested at the largest.
    processes: tuple[int, ...]
    backends: tuple[str, ...] = ()  # empty for every usable one
    rounds: int = 3  # of timed runs
    batch: int = 64  # rows of a global batch
    train: tuple[str, ...] = ()  # options, without those that choose the backend
    precisions: tuple[str, ...] = tuple(TOLERANCE)  # of the equality test
    time: bool = True  # whether to time as well
    seconds: float = 600  # time limit of one run
    # Whether trainings have virtual replicas, and so the same bits on every number of
    # replicas.
    virtual: bool = False
    # Whether each backend is started once, for equality and speed.
    quick: bool = False

    @property
    def most(self) -> int:
        """Return the largest number of replicas."""
        return self.processes[-1]


# Called before each run with its description and None; after it with its figures or "".
Report = Callable[[str, str | None], None]
# The description of a run, and the function that makes it and returns its figures.
Run = tuple[str, Callable[[], str]]


class Comparison:
    """Runs a comparison; a UsageError if a requested backend cannot be used here."""

    def __init__(self, plan: ComparisonOptions, results: Results):
        self.plan = plan
        self.results = results  # the results so far, also after an interruption
        self.folder = Path()  # for the files of the runs
        wanted = plan.backends or tuple(BACKENDS)
        self.backends = [name for name in wanted if self._usable(name)]
        if REFERENCE not in self.backends:
            self.backends.insert(0, REFERENCE)
        self.synchronous = [n for n in self.backends if BACKENDS[n].synchronous]
        if plan.quick or plan.virtual:
            self.backends = list(self.synchronous)
        self._planned = list(self._plan_runs())
        self.runs = len(self._planned)  # total number of runs

    def _usable(self, name: str) -> bool:
        if name not in BACKENDS:
            raise UsageError(
                f"unknown backend {name!r}", hint=f"--backends {','.join(BACKENDS)}"
            )
        found = can_start(name, self.plan.most)
        if not found.usable:
            self.results.left_out[name] = f"{found.reason} (HINT: {found.hint})"
            if name in self.plan.backends:
                raise UsageError(
                    f"backend {name!r} cannot be used here: {found.reason}",
                    hint=found.hint,
                )
        return found.usable

    def _plan_runs(self) -> Iterator[Run]:
        for precision in self.plan.precisions:
            yield from self._test_equality(precision)
        if self.plan.quick:
            yield f"speed: {SHARE}", self._time_share
        if not self.plan.time or self.plan.quick:
            return
        for processes in self.plan.processes:
            yield from self._time(processes)

    def run(self, report: Report) -> None:
        """Make every run; a failed run is recorded and the next one starts."""
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            for what, make in self._planned:
                report(what, None)
                report(what, make())
        self.results.finished = True

    def _test_equality(self, precision: str) -> Iterator[Run]:
        plan, proof = self.plan, EqualityProof(REFERENCE)
        traces: dict[str, Recorded] = {}
        other_orders: list[Recorded] = []
        # Uneven shares are part of the test, so the batch is divisible by no number of
        # replicas.
        batch = undividable(plan.batch, plan.most)
        options = [*plan.train, "--precision", precision, "--verbose", "0"]
        options += ["--steps", str(PROOF_STEPS), "--global-batch-size", str(batch)]
        reordered = precision == "float32" and not plan.virtual
        parts = [str(plan.most), str(plan.most + 1)] if reordered else []

        def trace(name: str, backend: str, processes: int) -> str:
            self.results.equal[precision] = proof
            path = self.folder / f"{name}.npz"
            program = python_command.arguments("collective.comparison.trace", str(path))
            if name == REFERENCE and parts:
                program += ["--orders", ",".join(parts)]
            if plan.quick:
                summary = self.folder / "summary.json"
                summary.unlink(missing_ok=True)
                program += ["--summary", str(summary)]
            ended = self._start(backend, processes, [*program, *options], path)
            if ended.code == 0 and path.exists():
                traces[name] = Recorded.read(path)
                proof.losses[name] = traces[name].losses.tolist()
                if name == REFERENCE:
                    files = [path.with_name(f"{name}-{part}.npz") for part in parts]
                    other_orders.extend(map(Recorded.read, files))
                self._judge(TOLERANCE[precision], proof, traces, other_orders)
                if plan.quick:
                    self._add_speed(name, processes, json.loads(summary.read_text()))
                return self._figures(name, processes, proof)
            proof.failures[name] = [ended.failure or "wrote nothing", ended.tail]
            if ended.code == 2 and name == REFERENCE:
                message = ended.tail.rpartition("error: ")[2]
                reason, _, hint = message.partition("\nHINT: ")
                raise UsageError(
                    f"the training itself is not possible: {reason}",
                    hint=hint.strip() or "python train.py with the same options",
                )
            return f"{name}: {proof.failures[name][0]}"

        def planned(name: str, *arguments: Any) -> Run:
            return f"{precision}: {name}", partial(trace, name, *arguments)

        for backend in self.synchronous:
            yield planned(backend, backend, plan.most)
            if plan.virtual and backend not in ALONE:
                for processes in plan.processes[:-1]:
                    yield planned(f"{backend} on {processes}", backend, processes)

    def _add_speed(self, name: str, processes: int, summary: dict[str, Any]) -> None:
        timed = self.results.fast.setdefault(str(processes), {})
        timed[name] = Timed.of([summary])

    def _figures(self, name: str, processes: int, proof: EqualityProof) -> str:
        """Return the figures of a backend so far, in one line; empty if few."""
        found = []
        if verdict := proof.verdicts.get(name):
            how = "equal" if verdict.equal else "NOT EQUAL"
            found.append(f"{how} (weights {verdict.parameter:.1e})")
        timed = self.results.fast.get(str(processes), {}).get(name)
        if timed is not None and timed.rate:
            found.append(f"{timed.rate:,.0f} samples/s")
        return f"{name}: {', '.join(found)}" if found else ""

    def _judge(
        self,
        tolerance: float,
        proof: EqualityProof,
        traces: dict[str, Recorded],
        other_orders: Sequence[Recorded],
    ) -> None:
        """Compare every trace with the trace of one replica."""
        alone = traces.get(REFERENCE)
        if alone is None:
            return
        for name, recorded in traces.items():
            if self.plan.virtual:
                proof.verdicts[name] = judge_bits(alone, recorded)
            elif name != REFERENCE:
                proof.verdicts[name] = judge(alone, recorded, tolerance, other_orders)

    def _time_share(self) -> str:
        """Time one process on as many cores as one of the replicas has."""
        share = max(1, len(os.sched_getaffinity(0)) // self.plan.most)
        ended, summary = self._train(REFERENCE, 1, "--threads", str(share))
        if summary is None:
            return f"{SHARE}: {ended.failure}"
        self._add_speed(SHARE, self.plan.most, summary)
        return self._figures(SHARE, self.plan.most, EqualityProof(REFERENCE))

    def _time(self, processes: int) -> Iterator[Run]:
        share = max(1, len(os.sched_getaffinity(0)) // processes)
        contestants: dict[str, tuple[str, Sequence[str]]] = {
            name: (name, ()) for name in self.backends
        }
        contestants[SHARE] = (REFERENCE, ("--threads", str(share)))
        summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
        timed = {name: Timed() for name in contestants}

        def train(name: str, backend: str, more: Sequence[str]) -> str:
            self.results.fast[str(processes)] = timed
            if timed[name].failure:
                return ""
            ended, summary = self._train(backend, processes, *more)
            if summary:
                summaries[name].append(summary)
                timed[name] = Timed.of(summaries[name])
            else:
                timed[name] = dataclasses.replace(
                    timed[name], failure=ended.failure, tail=ended.tail
                )
            return self._figures(name, processes, EqualityProof(REFERENCE))

        for number in range(self.plan.rounds):
            for name, (backend, more) in contestants.items():
                what = f"{processes} replicas, round {number + 1}: {name}"
                yield what, partial(train, name, backend, more)

    def _train(
        self, backend: str, processes: int, *more: str
    ) -> tuple[CompletedRun, dict[str, Any] | None]:
        """Train once; return how it ended, and its summary if it succeeded."""
        path = self.folder / "summary.json"
        options = [*self.plan.train, "--global-batch-size", str(self.plan.batch)]
        options += ["--verbose", "0", *more, "--json", str(path)]
        program = python_command.arguments("collective.train", *options)
        ended = self._start(backend, processes, program, path)
        succeeded = ended.code == 0 and not ended.failure
        return ended, json.loads(path.read_text()) if succeeded else None

    def _start(
        self,
        backend: str,
        processes: int,
        program: Sequence[str],
        output: Path,
    ) -> CompletedRun:
        """Run a program on a backend after removing the output of an earlier run."""
        output.unlink(missing_ok=True)
        command = launching.command_line(backend, processes, program)
        return run(command, self.plan.seconds)


def undividable(batch: int, most: int) -> int:
    """Return the largest size up to ``batch`` that no number of replicas divides."""
    for size in range(batch, most, -1):
        if all(size % n for n in range(2, most + 1)):
            return size
    return batch
