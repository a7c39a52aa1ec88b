"""Whether two trainings are equal, and the first step at which they differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
# Factor between the rounding error seen for one summation order and that allowed for
# another.
ROUNDING = 8.0


@dataclass(frozen=True)
class Recorded:
    """A training as written by ``collective.comparison.trace``, which gives the shapes."""

    losses: np.ndarray
    names: list[str]
    sketches: np.ndarray
    sizes: np.ndarray
    final: list[np.ndarray]
    sha256: str = ""

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Read a trace."""
        with np.load(path) as file:
            names = file["names"].tolist()
            final = [file[f"final {i}"] for i in range(len(names))]
            arrays = (file["sketches"], file["sizes"], final)
            return cls(file["losses"], names, *arrays, str(file["sha256"]))


@dataclass(frozen=True)
class Verdict:
    """How far a training is from its reference."""

    equal: bool  # whether every difference is within the tolerance
    # The largest relative difference that is rounding, after the first and last step.
    tolerance: tuple[float, float]
    loss: float  # largest difference of a step's loss, relative to the reference's
    # Largest difference of a weight after the last step, relative to the largest weight
    # of its tensor; and the name of that tensor.
    parameter: float
    tensor: str
    first_step: int | None = None  # after which something differs, from 0
    first_tensor: str = ""  # the largest difference at that step: a path, or "loss"
    sha256: str = ""  # digest of the last state; empty if bits are not compared


def judge_bits(reference: Recorded, other: Recorded) -> Verdict:
    """Judge, as ``judge`` does, two trainings that should end with the same bits."""
    verdict = judge(reference, other, 0.0)
    same = verdict.equal and reference.sha256 == other.sha256
    return dataclasses.replace(verdict, equal=same, sha256=other.sha256)


def judge(
    reference: Recorded,
    other: Recorded,
    tolerance: float,
    other_orders: Sequence[Recorded] = (),
) -> Verdict:
    """Compare two trainings of the same model on the same batches.

    Args:
        reference: The training to compare with.
        other: The training in question.
        tolerance: The largest relative difference that is rounding.
        other_orders: The reference with its sums taken in other orders. The differences
            that this alone causes up to a step, times ``ROUNDING``, count as rounding:
            later steps amplify it (Adam divides a gradient near zero by itself).

    Raises:
        ValueError: If the two did not train the same model for the same number of steps.
    """
    if reference.names != other.names or len(reference.losses) != len(other.losses):
        raise ValueError("two trainings of different models or lengths")
    differences, ends = _differences(reference, other)
    allowed, at_end = np.full(len(differences), tolerance), tolerance
    for one in other_orders:
        rounded, end = _differences(reference, one)
        so_far = np.maximum.accumulate(rounded.max(axis=1))
        allowed = np.maximum(allowed, ROUNDING * so_far)
        at_end = max(at_end, ROUNDING * max(end), allowed[-1])
    worst = int(np.argmax(ends))
    beyond = ~(differences <= allowed[:, None])
    first_step, first_tensor = None, ""
    if beyond.any():
        first_step = int(np.argmax(beyond.any(axis=1)))
        most = int(np.argmax(differences[first_step]))
        first_tensor = ["loss", *reference.names][most]
    return Verdict(
        not beyond.any() and ends[worst] <= at_end,
        (float(allowed[0]), float(at_end)),
        float(differences[:, 0].max()),
        ends[worst],
        reference.names[worst],
        first_step,
        first_tensor,
    )


def _differences(
    reference: Recorded, other: Recorded
) -> tuple[np.ndarray, list[float]]:
    """Return the relative differences ``[steps, 1 + tensors]``, and the final ones."""
    losses = _relative(other.losses, reference.losses, np.abs(reference.losses))
    # A sketch adds up every element of a tensor, so its rounding grows with the norm.
    moved = _relative(other.sketches, reference.sketches, reference.sizes)
    ends = [
        float(_relative(b, a, np.abs(a).max(initial=0)).max(initial=0))
        for a, b in zip(reference.final, other.final, strict=True)
    ]
    return np.concatenate([losses[:, None], moved], axis=1), ends


def _relative(got: np.ndarray, wanted: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return differences over sizes; infinite if only one of the two is finite."""
    difference = np.abs(got - wanted)
    difference = np.where(np.isnan(difference), np.inf, difference)
    difference = np.where(np.isnan(got) & np.isnan(wanted), 0.0, difference)
    return difference / np.where(size == 0, 1.0, size)
