"""The runs of a comparison, one after the other, and what is recorded of each."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collective.backends import launching
from collective.backends.auto import choose
from collective.backends.launching import CompletedRun, run
from collective.backends.registry import BACKENDS, can_start
from collective.bench.limits import Limits
from collective.comparison.equality import TOLERANCE, Recorded, judge, judge_bits
from collective.comparison.results import Learned, Proof, Results
from collective.comparison.speed import MESSAGE_SIZES, Auto, Timed
from collective.errors import UsageError

REFERENCE = "single"
SHARE = "one share"
# Runs of one replica, whatever the number of replicas of the others.
ALONE = (SHARE, *(name for name, kind in BACKENDS.items() if kind.one_replica))
PROOF_STEPS = 30


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        processes: Numbers of replicas, ascending; equality is tested at the largest.
        backends: Names; empty for every usable backend.
        rounds: Rounds of timed runs.
        batch: Rows of a global batch.
        train: Options for ``train.py``, without those that choose the backend.
        precisions: Precisions of the equality test.
        time: Whether to time as well.
        perturb: Backend and perturbation, or None.
        seconds: Time limit of one run.
        virtual: Whether trainings have virtual replicas, and so the same bits on each
            number of replicas.
    """

    processes: tuple[int, ...]
    backends: tuple[str, ...] = ()
    rounds: int = 3
    batch: int = 64
    train: tuple[str, ...] = ()
    precisions: tuple[str, ...] = tuple(TOLERANCE)
    time: bool = True
    perturb: tuple[str, str] | None = None
    seconds: float = 600
    virtual: bool = False

    @property
    def most(self) -> int:
        """The largest number of replicas."""
        return self.processes[-1]


# Called before each run with its description.
Report = Callable[[str], None]


class Comparison:
    """Runs a plan.

    Attributes:
        results: The results so far, also after an interruption.
        runs: Total number of runs.

    Raises:
        UsageError: If a requested backend is unknown or cannot be used here.
    """

    def __init__(self, plan: Plan, results: Results):
        self.plan = plan
        self.results = results
        wanted = plan.backends or tuple(BACKENDS)
        self.backends = [name for name in wanted if self._usable(name)]
        if REFERENCE not in self.backends:
            self.backends.insert(0, REFERENCE)
        self.synchronous = [n for n in self.backends if BACKENDS[n].synchronous]
        asynchronous = [n for n in self.backends if not BACKENDS[n].synchronous]
        if plan.perturb and plan.perturb[0] not in self.synchronous:
            raise UsageError(
                f"--perturb {plan.perturb[0]}: that backend is not compared",
                hint="--perturb and --backends with one of "
                f"{', '.join(self.synchronous)}",
            )
        if not plan.precisions or plan.perturb or plan.virtual:
            asynchronous = []
        if plan.virtual:
            self.backends = list(self.synchronous)
        self.learners = [REFERENCE, *asynchronous] if asynchronous else []
        self.runs = self._count_runs()

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

    def _count_runs(self) -> int:
        plan = self.plan
        runs = len(plan.precisions) * len(self.synchronous) + len(self.learners)
        if plan.virtual:
            several = [name for name in self.synchronous if name not in ALONE]
            runs += len(plan.precisions) * len(several) * (len(plan.processes) - 1)
        else:
            runs += 2 * ("float32" in plan.precisions)
        if plan.time:
            runs += plan.rounds * len(plan.processes) * (len(self.backends) + 1)
            runs += sum(processes > 1 for processes in plan.processes)
            runs += sum(n == REFERENCE or n not in ALONE for n in self.synchronous)
        return runs

    def run(self, report: Report) -> None:
        """Makes every run; a failed run is recorded and the next one starts."""
        with tempfile.TemporaryDirectory() as folder:
            for precision in self.plan.precisions:
                self._test_equality(precision, Path(folder), report)
            for name in self.learners:
                self._learn(name, Path(folder), report)
            if self.plan.time:
                for processes in self.plan.processes:
                    self._time(processes, Path(folder), report)
                    if processes > 1:
                        self._ask_auto(processes, Path(folder), report)
                self._time_allreduce(Path(folder), report)
        self.results.finished = True

    # --- equality -----------------------------------------------------------------

    def _test_equality(self, precision: str, folder: Path, report: Report) -> None:
        plan, proof = self.plan, Proof(REFERENCE)
        self.results.equal[precision] = proof
        traces: dict[str, Recorded] = {}
        # Uneven shares are part of the test, so no number of replicas divides a batch.
        options = [*plan.train, "--precision", precision, "--verbose", "0"]
        options += ["--steps", str(PROOF_STEPS)]
        options += ["--global-batch-size", str(undividable(plan.batch, plan.most))]

        def trace(
            name: str, backend: str, *more: str, processes: int = plan.most
        ) -> None:
            report(f"{precision}: {name}")
            path = folder / f"{name}.npz"
            perturb = plan.perturb if plan.perturb and plan.perturb[0] == name else ()
            first = ["--perturb", perturb[1]] if perturb else []
            module = ["-m", "collective.comparison.trace", str(path)]
            ended = self._run(
                backend, processes, [*module, *first, *options, *more], path
            )
            if ended.code == 0 and path.exists():
                traces[name] = Recorded.read(path)
                proof.losses[name] = traces[name].losses.tolist()
                return
            proof.failures[name] = [ended.failure or "wrote nothing", ended.tail]
            if ended.code == 2 and name == REFERENCE:
                message = ended.tail.rpartition("error: ")[2]
                reason, _, hint = message.partition("\nHINT: ")
                raise UsageError(
                    f"the training itself is not possible: {reason}",
                    hint=hint.strip() or "python train.py with the same options",
                )

        for backend in self.synchronous:
            trace(backend, backend)
            if plan.virtual and backend not in ALONE:
                for processes in plan.processes[:-1]:
                    trace(f"{backend} on {processes}", backend, processes=processes)
        other_orders = []
        if precision == "float32" and not plan.virtual:
            for parts in (plan.most, plan.most + 1):
                name = f"{REFERENCE} in {parts} parts"
                trace(name, REFERENCE, "--accumulate", str(parts))
                proof.losses.pop(name, None)
                if name in traces:
                    other_orders.append(traces.pop(name))
        self._judge(precision, proof, traces, other_orders)

    def _judge(
        self,
        precision: str,
        proof: Proof,
        traces: dict[str, Recorded],
        other_orders: Sequence[Recorded],
    ) -> None:
        """Compares every trace with that of one replica.

        A model that depends on its number of replicas is compared between the backends
        of several replicas instead.
        """
        alone = traces.get(REFERENCE)
        if alone is None:
            return
        skipped = [REFERENCE]
        if alone.by_replicas and self.plan.most > 1:
            proof.because = alone.by_replicas
            several = [name for name in traces if name not in ALONE]
            if not several:
                return
            proof.reference, skipped = several[0], [*ALONE, several[0]]
            other_orders = ()  # micro-batches train a different model as well
        for name, recorded in traces.items():
            if self.plan.virtual:
                proof.verdicts[name] = judge_bits(alone, recorded)
            elif name not in skipped:
                proof.verdicts[name] = judge(
                    traces[proof.reference],
                    recorded,
                    TOLERANCE[precision],
                    other_orders,
                )

    def _learn(self, name: str, folder: Path, report: Report) -> None:
        """Records the learning curve of a backend that cannot be compared for equality."""
        report(f"learning curve: {name}")
        ended, summary = self._train(name, self.plan.most, folder)
        self.results.learned[name] = (
            Learned.of(summary) if summary else Learned(failure=ended.failure)
        )

    # --- speed --------------------------------------------------------------------

    def _time(self, processes: int, folder: Path, report: Report) -> None:
        share = max(1, len(os.sched_getaffinity(0)) // processes)
        contestants: dict[str, tuple[str, Sequence[str]]] = {
            name: (name, ()) for name in self.backends
        }
        contestants[SHARE] = (REFERENCE, ("--threads", str(share)))
        summaries: dict[str, list[dict]] = {name: [] for name in contestants}
        timed = {name: Timed() for name in contestants}
        self.results.fast[str(processes)] = timed
        for number in range(self.plan.rounds):
            for name, (backend, more) in contestants.items():
                report(f"{processes} replicas, round {number + 1}: {name}")
                if timed[name].failure:
                    continue
                ended, summary = self._train(backend, processes, folder, *more)
                if summary:
                    summaries[name].append(summary)
                    timed[name] = Timed.of(summaries[name])
                else:
                    timed[name] = dataclasses.replace(
                        timed[name], failure=ended.failure, tail=ended.tail
                    )

    def _ask_auto(self, processes: int, folder: Path, report: Report) -> None:
        """Records what ``--backend auto`` chooses, by a training of two steps."""
        report(f"{processes} replicas: the choice of auto")
        with_mpi = can_start("mpi", processes).usable
        launcher = "mpirun" if with_mpi else "collectiverun"
        measure = {choose.SWITCH: os.environ.get(choose.SWITCH) or choose.MEASURE}
        ended, summary = self._train(
            "auto",
            processes,
            folder,
            "--steps",
            "2",
            launcher=launcher,
            variables=launching.environment({**os.environ, **measure}),
        )
        self.results.auto[str(processes)] = (
            Auto(summary["backend"], summary["predicted_all_reduce"])
            if summary
            else Auto(failure=ended.failure)
        )

    def _time_allreduce(self, folder: Path, report: Report) -> None:
        path = folder / "allreduce.json"
        sizes = ["--sizes", ",".join(map(str, MESSAGE_SIZES))]
        program = ["-m", "collective.backends.auto.probe", str(path), *sizes]
        for backend in self.synchronous:
            if backend == REFERENCE:
                report("the floor of the all-reduce")
                self._measure_floor(path)
            if backend in ALONE:
                continue
            report(f"all-reduce: {backend}")
            if self._run(backend, self.plan.most, program, path).code == 0:
                self.results.allreduce[backend] = {
                    str(point["size"]): point["seconds"]
                    for point in json.loads(path.read_text())
                }

    def _measure_floor(self, path: Path) -> None:
        """Records the limits of this host, measured by ``collective.bench``."""
        path.unlink(missing_ok=True)
        bench = [sys.executable, "-m", "collective.bench", "--sizes", "4"]
        start = [sys.executable, "-m", "collective.launch", "-np", str(self.plan.most)]
        if run([*start, *bench, "--json", str(path)], self.plan.seconds).code != 0:
            return
        limits = Limits(**json.loads(path.read_text())["limits"])
        for size in MESSAGE_SIZES:
            self.results.floor[str(size)] = limits.private(size)

    # --- one run ------------------------------------------------------------------

    def _train(
        self,
        backend: str,
        processes: int,
        folder: Path,
        *more: str,
        launcher: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> tuple[CompletedRun, dict[str, Any] | None]:
        """Trains once; returns how it ended, and its summary if it succeeded."""
        path = folder / "summary.json"
        options = [*self.plan.train, "--global-batch-size", str(self.plan.batch)]
        options += ["--verbose", "0", *more, "--json", str(path)]
        program = ["-m", "collective.train", *options]
        ended = self._run(backend, processes, program, path, launcher, variables)
        succeeded = ended.code == 0 and not ended.failure
        return ended, json.loads(path.read_text()) if succeeded else None

    def _run(
        self,
        backend: str,
        processes: int,
        program: Sequence[str],
        output: Path,
        launcher: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> CompletedRun:
        """Runs a program on a backend after removing the output of an earlier run."""
        output.unlink(missing_ok=True)
        command = launching.line(backend, processes, program, launcher)
        return run(command, self.plan.seconds, variables)


def undividable(batch: int, most: int) -> int:
    """Returns the largest size up to ``batch`` that no number of replicas divides."""
    for size in range(batch, most, -1):
        if all(size % n for n in range(2, most + 1)):
            return size
    return batch
