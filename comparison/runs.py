"""The runs of a comparison, one after the other, and what is kept of each."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.backends import launch_command
from collective.backends.launchers import STARTS
from collective.backends.registry import BACKENDS, can_start
from collective.backends.supervised_run import run
from collective.bench.limits import Limits
from collective.comparison.equality import TOLERANCE, Recorded, judge
from collective.comparison.results import Learned, Proof, Results
from collective.comparison.speed import MESSAGE_SIZES, Auto, Timed
from collective.errors import UsageError

REFERENCE = "single"
SHARE = "one share"
# One replica, however many the others have.
ALONE = (SHARE, *(name for name, start in STARTS.items() if start.one_replica))
PROOF_STEPS = 30


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        processes: Numbers of replicas, ascending; the proof is at the largest.
        backends: Names; empty for all that can be used.
        rounds: Of the timed runs.
        batch: Rows of a global batch.
        train: Options for ``train.py``, those for the backend not among them.
        precisions: Of the proof.
        time: Whether to time, too.
        perturb: Backend and perturbation, or None.
        seconds: Deadline of one run.
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

    @property
    def most(self) -> int:
        """The largest number of replicas."""
        return self.processes[-1]


# Told before each run: what it is.
Tell = Callable[[str], None]


class Comparison:
    """Runs a plan.

    Attributes:
        results: What has been found so far, also when it is interrupted.
        runs: How many runs there are in all.
    """

    def __init__(self, plan: Plan, results: Results):
        self.plan = plan
        self.results = results
        wanted = plan.backends or tuple(BACKENDS)
        self.backends = [name for name in wanted if self._usable(name)]
        if REFERENCE not in self.backends:
            self.backends.insert(0, REFERENCE)
        self.equals = [n for n in self.backends if BACKENDS[n].synchronous]
        others = [n for n in self.backends if not BACKENDS[n].synchronous]
        if plan.perturb and plan.perturb[0] not in self.equals:
            raise UsageError(
                f"backend {plan.perturb[0]!r} shall go wrong, and is not compared",
                hint=f"--perturb and --backends with one of {', '.join(self.equals)}",
            )
        learns = bool(others and plan.precisions and not plan.perturb)
        self.learners = [REFERENCE, *others] if learns else []
        proofs = len(plan.precisions) * len(self.equals) + len(self.learners)
        proofs += 2 * ("float32" in plan.precisions)
        timed = plan.rounds * len(plan.processes) * (len(self.backends) + 1)
        timed += sum(processes > 1 for processes in plan.processes)
        floor_and_allreduce = sum(n == REFERENCE or n not in ALONE for n in self.equals)
        self.runs = proofs + (timed + floor_and_allreduce) * plan.time

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

    def run(self, tell: Tell) -> None:
        """Runs everything; what fails is kept as a failure, and the rest goes on."""
        with tempfile.TemporaryDirectory() as folder:
            for precision in self.plan.precisions:
                self._prove(precision, Path(folder), tell)
            for name in self.learners:
                self._learn(name, Path(folder), tell)
            if self.plan.time:
                for processes in self.plan.processes:
                    self._time(processes, Path(folder), tell)
                    if processes > 1:
                        self._ask_auto(processes, Path(folder), tell)
                self._time_allreduce(Path(folder), tell)
        self.results.finished = True

    # --- equal? -------------------------------------------------------------------

    def _prove(self, precision: str, folder: Path, tell: Tell) -> None:
        plan, proof = self.plan, Proof(REFERENCE)
        self.results.equal[precision] = proof
        traces: dict[str, Recorded] = {}
        # That no number of replicas divides a batch is part of the proof.
        options = [*plan.train, "--precision", precision, "--verbose", "0"]
        options += ["--steps", str(PROOF_STEPS)]
        options += ["--global-batch-size", str(undividable(plan.batch, plan.most))]

        def trace(name: str, backend: str, *more: str) -> None:
            path = folder / f"{name}.npz"
            path.unlink(missing_ok=True)
            perturbed = plan.perturb is not None and plan.perturb[0] == name
            first = ["--perturb", plan.perturb[1]] if perturbed and plan.perturb else []
            tell(f"{precision}: {name}")
            ended = run(
                launch_command.line(
                    backend,
                    plan.most,
                    [
                        "-m",
                        "collective.comparison.trace",
                        str(path),
                        *first,
                        *options,
                        *more,
                    ],
                ),
                plan.seconds,
            )
            if ended.code == 0 and path.exists():
                traces[name] = Recorded.read(path)
                proof.losses[name] = traces[name].losses.tolist()
            else:
                proof.failures[name] = [ended.failure or "wrote nothing", ended.tail]
                if ended.code == 2 and name == REFERENCE:
                    told, _, hint = ended.tail.rpartition("error: ")[2].partition(
                        "\nHINT: "
                    )
                    raise UsageError(
                        f"this training cannot be done at all: {told}",
                        hint=hint.strip() or "python train.py with the same options",
                    )

        for backend in self.equals:
            trace(backend, backend)
        others = []
        if precision == "float32":
            for parts in (plan.most, plan.most + 1):
                name = f"{REFERENCE} in {parts} parts"
                trace(name, REFERENCE, "--accumulate", str(parts))
                proof.losses.pop(name, None)
                if name in traces:
                    others.append(traces.pop(name))
        self._judge(precision, proof, traces, others)

    def _judge(
        self,
        precision: str,
        proof: Proof,
        traces: dict[str, Recorded],
        other_orders: Sequence[Recorded],
    ) -> None:
        alone = traces.get(REFERENCE)
        if alone is None:
            return
        same = [REFERENCE]
        if alone.by_replicas and self.plan.most > 1:
            proof.because = alone.by_replicas
            others = [name for name in traces if name not in ALONE]
            if not others:
                return
            proof.reference, same = others[0], [*ALONE, others[0]]
            other_orders = ()  # micro-batches train another model, too
        for name, recorded in traces.items():
            if name not in same:
                proof.verdicts[name] = judge(
                    traces[proof.reference],
                    recorded,
                    TOLERANCE[precision],
                    other_orders,
                )

    def _learn(self, name: str, folder: Path, tell: Tell) -> None:
        """Trains to see what is learned by when, in place of a proof."""
        tell(f"learning: {name}")
        path = folder / "learned.json"
        path.unlink(missing_ok=True)
        options = [*self.plan.train, "--verbose", "0", "--json", str(path)]
        options += ["--global-batch-size", str(self.plan.batch)]
        program = ["-m", "collective.train", *options]
        ended = run(
            launch_command.line(name, self.plan.most, program), self.plan.seconds
        )
        self.results.learned[name] = (
            Learned.of(json.loads(path.read_text()))
            if ended.code == 0
            else Learned(failure=ended.failure)
        )

    # --- fast? --------------------------------------------------------------------

    def _time(self, processes: int, folder: Path, tell: Tell) -> None:
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
                tell(f"{processes} replicas, round {number + 1}: {name}")
                if timed[name].failure:
                    continue
                path = folder / "summary.json"
                path.unlink(missing_ok=True)
                options = [*self.plan.train, "--verbose", "0", *more]
                options += ["--global-batch-size", str(self.plan.batch)]
                options += ["--json", str(path)]
                program = ["-m", "collective.train", *options]
                ended = run(
                    launch_command.line(backend, processes, program), self.plan.seconds
                )
                if ended.code == 0:
                    summaries[name].append(json.loads(path.read_text()))
                    timed[name] = Timed.of(summaries[name])
                else:
                    timed[name] = dataclasses.replace(
                        timed[name], failure=ended.failure, tail=ended.tail
                    )

    def _ask_auto(self, processes: int, folder: Path, tell: Tell) -> None:
        """What ``--backend auto`` takes, in a training of two steps."""
        tell(f"{processes} replicas: what auto takes")
        path = folder / "auto.json"
        path.unlink(missing_ok=True)
        options = [*self.plan.train, "--global-batch-size", str(self.plan.batch)]
        options += ["--verbose", "0", "--steps", "2", "--json", str(path)]
        launched = can_start("mpi", processes).usable
        ended = run(
            launch_command.line(
                "auto",
                processes,
                ["-m", "collective.train", *options],
                "mpirun" if launched else "collectiverun",
            ),
            self.plan.seconds,
        )
        if ended.failure:
            self.results.auto[str(processes)] = Auto(failure=ended.failure)
            return
        told = json.loads(path.read_text())
        self.results.auto[str(processes)] = Auto(
            told["backend"], told["predicted_all_reduce"]
        )

    def _time_allreduce(self, folder: Path, tell: Tell) -> None:
        path = folder / "allreduce.json"
        for backend in self.equals:
            if backend == REFERENCE:
                tell("the floor of the all-reduce")
                self._floor(path)
            if backend in ALONE:
                continue
            tell(f"all-reduce: {backend}")
            path.unlink(missing_ok=True)
            sizes = ",".join(map(str, MESSAGE_SIZES))
            program = [
                "-m",
                "collective.backends.auto.probe",
                str(path),
                "--sizes",
                sizes,
            ]
            ended = run(
                launch_command.line(backend, self.plan.most, program), self.plan.seconds
            )
            if ended.code == 0:
                self.results.allreduce[backend] = {
                    str(point["size"]): point["seconds"]
                    for point in json.loads(path.read_text())
                }

    def _floor(self, path: Path) -> None:
        """The limits of this host, from the core's own benchmark."""
        path.unlink(missing_ok=True)
        bench = [sys.executable, "-m", "collective.bench", "--sizes", "4"]
        start = [sys.executable, "-m", "collective.launch", "-np", str(self.plan.most)]
        if run([*start, *bench, "--json", str(path)], self.plan.seconds).code != 0:
            return
        limits = Limits(**json.loads(path.read_text())["limits"])
        for size in MESSAGE_SIZES:
            self.results.floor[str(size)] = limits.private(size)


def undividable(batch: int, most: int) -> int:
    """The largest batch up to ``batch`` that no number of replicas divides."""
    for size in range(batch, most, -1):
        if all(size % n for n in range(2, most + 1)):
            return size
    return batch
