"""Writes a ledger: the rows that each step has used, and the replicas that used them.

Rank 0 only ever appends to the file, one line of JSON at a time. A ``from`` line says
that the state before some step was put in place (a start, a resume, a change of ranks)
and on how many replicas; it undoes all lines of that step and later ones. A ``step`` line
names the rows that each replica has read in a step that every rank has finished: places in
the global batch, and a checksum of the row numbers, as the reader itself saw them.
``python -m collective.training.observers.ledger.verify`` proves from it that every row was used once an epoch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from collective import disk
from collective.errors import CollectiveError, UsageError
from collective.net import private_files
from collective.training.input.plan import RowPlan

PRIME = 2**31 - 1


def mark(numbers: np.ndarray) -> int:
    """Return a checksum of a set of row numbers: below 2**31, for any order of them.

    It is the sum of their cubes modulo a prime. Two different sets of a few rows have the
    same mark with a probability of 2**-31.
    """
    base = (numbers.astype(np.int64) % PRIME + 1) % PRIME
    return int((base * base % PRIME * base % PRIME).sum() % PRIME)


class Ledger:
    """Appends to the file, which is created if missing. Rank 0 has one.

    Raises:
        UsageError: If it cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self._file = private_files.open_output(path, os.O_APPEND)
        except OSError as error:
            raise UsageError(
                f"the ledger cannot be written to {path}: {error.strerror}",
                hint="--ledger FILE in a folder that exists and can be written",
                everywhere=False,
            ) from None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # a kill tore the last line; the next is whole

    def begin(self, plan: RowPlan, step: int, replicas: int, backend: str) -> None:
        """Write that the state before ``step`` is in place on so many replicas."""
        self._append(
            {
                "from": step,
                "replicas": replicas,
                "backend": backend,
                "time": round(time.time(), 3),
                "plan": dataclasses.asdict(plan),
            }
        )

    def add(self, step: int, receipts: Iterable[tuple[int, int, int]]) -> None:
        """Write the rows that each replica has read in a step: start, stop, mark."""
        self._append({"step": step, "read": [list(r) for r in receipts]})

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        disk.sync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._file, data)
        except OSError as error:
            written, reason = -1, error.strerror
        else:
            reason = "it is full"
        if written != len(data):
            raise CollectiveError(
                f"the ledger {self.path} cannot be written to: {reason}",
                hint="free some space, then --resume; or leave --ledger out",
                everywhere=False,
            )
