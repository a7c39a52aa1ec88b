"""The proof that every row was used exactly once an epoch, from the ledger of a run.

    python -m collective.training.observers.ledger.verify FILE

It replays a file of ``collective.training.observers.ledger.writer``, through kills and
resumes; steps that a resume has undone do not count. It computes from the plan which rows
each replica had to read in each step, and compares them with the rows that the replica says
it has read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from collective.errors import UsageError, exit_code, printable
from collective.training.input.plan import RowPlan
from collective.training.observers.ledger.writer import mark

Steps = dict[int, list[tuple[int, int, int]]]
"""What each replica has read in each step: start, stop, mark."""


@dataclasses.dataclass
class Run:
    """The steps that followed one ``from`` line."""

    start: int
    replicas: int
    backend: str
    last: int  # the last step written, or ``start - 1``
    undone: int  # steps written before that it undid


@dataclasses.dataclass
class Proof:
    """What a ledger proves."""

    plan: RowPlan
    runs: list[Run]  # starts and resumes of the training, in order
    faults: list[str]  # one sentence for each fault; empty for a perfect ledger
    epochs: list[int]  # rows used in each epoch: all of them, except in the last


def check(path: str | os.PathLike[str]) -> Proof:
    """Replay a ledger; raise a UsageError if the file cannot be read, or is no ledger."""
    plan, runs, steps, faults = _replay(path)
    per_epoch = plan.steps_per_epoch
    last = max(steps, default=-1)
    epochs = []
    for epoch in range(-(-(last + 1) // per_epoch)):
        used, wanted = np.zeros((2, plan.rows), np.int64)
        known = True
        for step in range(epoch * per_epoch, min((epoch + 1) * per_epoch, last + 1)):
            numbers = plan.row_numbers(step, step + 1)
            wanted[numbers] = 1
            if step not in steps:
                faults.append(f"step {step} is not in the ledger")
                continue
            for replica, (start, stop, marked) in enumerate(steps[step]):
                mine = numbers[start:stop]
                np.add.at(used, mine, 1)
                if stop > len(numbers) or marked != mark(mine):
                    known = False
                    faults.append(
                        f"step {step}: replica {replica} has read other rows than "
                        f"those at places {start} to {stop} of the batch"
                    )
        if known:
            faults += _named(epoch, "was not used", np.flatnonzero(used < wanted))
            faults += _named(epoch, "was used twice", np.flatnonzero(used > 1))
        epochs.append(int((used > 0).sum()))
    return Proof(plan, runs, faults, epochs)


def _named(epoch: int, what: str, rows: np.ndarray) -> list[str]:
    named = [f"epoch {epoch}: row {row} {what}" for row in rows[:10]]
    if len(rows) > 10:
        named.append(f"epoch {epoch}: and {len(rows) - 10} more rows: {what}")
    return named


def _replay(
    path: str | os.PathLike[str],
) -> tuple[RowPlan, list[Run], Steps, list[str]]:
    """Return plan, runs, the steps that no later line undoes, and their faults."""
    plan: RowPlan | None = None
    runs: list[Run] = []
    steps: Steps = {}
    faults: list[str] = []
    for number, line in _lines(path):
        if fault := _fault(line):
            raise _no_ledger(path, f"line {number} {fault}")
        if "from" in line:
            resumed, start = RowPlan(**line["plan"]), line["from"]
            if plan not in (None, resumed) and start:
                faults.append(f"line {number}: continues with another plan of batches")
            plan = resumed
            gone = [step for step in steps if step >= start]
            for step in gone:
                del steps[step]
            runs.append(
                Run(start, line["replicas"], line["backend"], start - 1, len(gone))
            )
            continue
        step = line["step"]
        if not runs:
            raise _no_ledger(path, f"line {number} is before any 'from'")
        if step in steps:
            faults.append(f"step {step} was made twice, its rows used twice")
        elif len(line["read"]) != runs[-1].replicas:
            faults.append(
                f"step {step}: {len(line['read'])} replicas of {runs[-1].replicas}"
            )
        steps[step] = [(start, stop, marked) for start, stop, marked in line["read"]]
        runs[-1].last = step
    if plan is None:
        raise _no_ledger(path, "it is empty")
    return plan, runs, steps, faults


def _fault(line: dict[str, Any]) -> str:
    """Return the reason why a line is not a ledger's; empty if it is."""

    def natural(*values: Any) -> bool:
        return all(type(value) is int and value >= 0 for value in values)

    needed = ("replicas", "backend", "plan") if "from" in line else ("read",)
    for name in needed:
        if name not in line:
            return f"has no {name!r}"
    if "from" in line:
        try:
            plan = RowPlan(**line["plan"])
        except TypeError:
            return "has no 'plan of this version'"
        fits = (
            natural(line["from"], line["replicas"], plan.rows, plan.global_batch_size)
            and type(plan.seed) is int
            and _is_order(plan.shuffle)
            and plan.rows > 0
            and plan.global_batch_size > 0
        )
    else:
        read = line["read"]
        fits = (
            natural(line["step"])
            and isinstance(read, list)
            and all(isinstance(r, list) and len(r) == 3 and natural(*r) for r in read)
        )
    return "" if fits else "has other values than a ledger has"


def _is_order(shuffle: Any) -> bool:
    """Return whether a plan may have this order of rows."""
    if not isinstance(shuffle, str):
        return type(shuffle) is bool
    # Only here: what checks a ledger of another order needs no TensorFlow.
    from collective.training.input.row_order import KINDS

    return shuffle in KINDS


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete lines; a kill may have torn the last line of a run."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read().split("\n")
    except OSError as error:
        raise _no_ledger(path, error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise _no_ledger(path, str(error)) from None
    torn = 0
    for number, content in enumerate(text, 1):
        if not content:
            continue
        try:
            line = json.loads(content)
            fine = isinstance(line, dict) and ("from" in line or "step" in line)
        except (ValueError, RecursionError):
            fine = False
        if not fine:
            torn = number
            continue
        if torn and "from" not in line:
            raise _no_ledger(path, f"line {torn} is none of a ledger")
        torn = 0
        yield number, line


def _no_ledger(path: Any, why: str) -> UsageError:
    return UsageError(
        f"{path} is not a ledger: {why}",
        hint="python train.py --ledger FILE writes one",
    )


def print_proof(proof: Proof) -> None:
    """Print the proof of a ledger."""
    for run in proof.runs:
        undone = f", {run.undone} steps undone and made again" if run.undone else ""
        replicas = f"{run.replicas} replica" + "s" * (run.replicas > 1)
        print(
            f"steps {run.start} to {run.last}: {replicas} ({run.backend}){undone}"
            if run.last >= run.start
            else f"from step {run.start}: no step on {replicas} ({run.backend}){undone}"
        )
    rows = proof.plan.rows
    for epoch, used in enumerate(proof.epochs):
        if not proof.faults:
            part = f"all {rows} rows" if used == rows else f"{used} of {rows} rows"
            print(f"epoch {epoch}: {part}, each used once")
    for fault in proof.faults:
        print(printable(f"error: {fault}"))


def main(arguments: list[str]) -> int:
    """Verify the ledger of the command line; return 1 unless it is perfect."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(arguments) != 1:
        print(
            "error: one file is needed\nHINT: python -m collective.training.observers.ledger.verify FILE"
        )
        return 2

    def program() -> int:
        proof = check(arguments[0])
        print_proof(proof)
        return 1 if proof.faults else 0

    return exit_code(program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
