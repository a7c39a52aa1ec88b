"""The tables of ``verify``: differences from Keras' own training, and their first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from collective.fit_options import NOT_EQUAL
from collective.log import log
from collective.streams import is_terminal

_TENSORS = 12  # as many are shown


@dataclass
class Step:
    """One step by both."""

    number: int
    rows: int
    losses: tuple[float, float]  # Keras', and ours
    weights: float  # the relative difference of all weights together
    tensors: dict[str, float] = field(default_factory=dict)  # of each weight, by path

    @property
    def loss(self) -> float:
        """Return the relative difference of the losses."""
        return relative(*(np.float64(value) for value in self.losses))


def relative(stock: np.ndarray, ours: np.ndarray) -> float:
    """Return the norm of the difference, relative to the norm of Keras' own value."""
    difference, size = norm(np.subtract(ours, stock, dtype=np.float64)), norm(stock)
    return difference / size if size else (np.inf if difference else 0.0)


def norm(value: object) -> float:
    """Return the Euclidean norm, computed in float64."""
    return float(np.linalg.norm(np.asarray(value, np.float64)))


def show(
    steps: Sequence[Step],
    replicas: int,
    allowed: float,
    console: Console | None = None,
    *,
    hook: str = "",
) -> None:
    """Print the differences by step and by tensor, and whether they are rounding.

    Args:
        allowed: The relative difference that rounding may make.
        hook: The communication hook, with which the two differ by design.
    """
    console = console or Console(
        stderr=True,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=None if is_terminal() else False,
    )
    by = f"{replicas} replicas" if replicas > 1 else "one replica"
    console.print()
    console.print(f"{len(steps)} steps by {by}, and by Keras alone on the same batches")
    console.print(_by_step(steps))
    console.print()
    console.print(_by_tensor(steps))
    console.print()
    if hook:
        console.print(f"The training with {hook} is {NOT_EQUAL}, by design.")
        return
    other = next((step for step in steps if not _alike(step, allowed)), None)
    if other is None:
        console.print(
            f"The two trainings are equal to rounding (up to {allowed:g} is)."
        )
        return
    name = max(other.tensors, key=other.tensors.__getitem__)
    log.warning(
        f"this training is not Keras' own from step {other.number} on: the loss differs "
        f"by {other.loss:.1e}, the weights by {other.weights:.1e}, most of all "
        f"{name!r}, and rounding makes up to {allowed:g}"
    )


def _alike(step: Step, allowed: float) -> bool:
    loss = step.loss
    return (loss != loss or loss <= allowed) and step.weights <= allowed


def _by_step(steps: Sequence[Step]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("step", justify="right")
    table.add_column("rows", justify="right")
    for name in ("loss by Keras", "here", "differs by", "weights by"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most of all", no_wrap=True)
    for step in steps:
        name = max(step.tensors, key=step.tensors.__getitem__)
        table.add_row(
            str(step.number),
            str(step.rows),
            *(f"{value:.8g}" for value in step.losses),
            _shown(step.loss),
            _shown(step.weights),
            f"{name} {_shown(step.tensors[name])}" if step.tensors[name] else "",
        )
    return table


def _by_tensor(steps: Sequence[Step]) -> Table:
    """Return the tensors that differ most in any step, the largest difference first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("weight", no_wrap=True)
    table.add_column("largest difference", justify="right")
    table.add_column("in step", justify="right")
    largest = {}
    for name in steps[0].tensors:
        step = max(steps, key=lambda step: step.tensors[name])
        largest[name] = step.tensors[name], step.number
    order = sorted(largest, key=lambda name: -largest[name][0])
    for name in order[:_TENSORS]:
        difference, number = largest[name]
        table.add_row(name, _shown(difference), str(number))
    left = order[_TENSORS:]
    if left:
        table.add_row(f"{len(left)} more, up to", _shown(largest[left[0]][0]), "")
    return table


def _shown(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"
