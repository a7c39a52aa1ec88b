"""One line at the start of what the ranks hold in parts, how, and what stays whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import keras

from collective.log import log
from collective.training.keras_compat.model import bytes_of
from collective.training.model.variables import optimizer_variables
from collective.training.sharding.held import part_of
from collective.training.sharding.placing import Placing
from collective.training.steps.batch_function import BatchFunction, StepObserver
from collective.training.steps.program import Program

MOST_NAMES = 10


class LayoutReport(StepObserver):
    """Logs on rank 0, for each model before its first step.

    Args:
        placing: What lays the variables out.
    """

    def __init__(self, placing: Placing):
        self._placing = placing
        self._models: WeakSet[keras.Model] = WeakSet()

    def traced(self, function: BatchFunction, program: Program) -> None:
        """Log what the ranks hold of a model and its optimizers."""
        model = function.model
        if model in self._models or self._placing.backend.rank:
            return
        self._models.add(model)
        for line in lines(model, self._placing):
            log.info("%s", line)


def lines(model: keras.Model, placing: Placing) -> Iterator[str]:
    """Yield what the ranks hold of a model; nothing if all of it is whole, as usual."""
    found = [*model.variables, *optimizer_variables(model)]
    variables = list({id(v): v for v in found}.values())
    held = [part_of(v) for v in variables]
    kept = placing.kept_whole
    mine = {v.path: kept[v.path] for v in variables if v.path in kept}
    if not any(held) and not mine:
        return
    yield _totals(model, variables, held)
    for number, (path, why) in enumerate(mine.items()):
        if number == MOST_NAMES:
            yield f"not cut: {len(mine) - MOST_NAMES} more variables, likewise"
            break
        yield f"not cut: {path}: {why}"
    if unused := placing.unused_patterns():
        yield f"patterns of the layout map that match no variable: {', '.join(unused)}"


def _totals(model: keras.Model, variables: Sequence[Any], held: Sequence[Any]) -> str:
    by_layout: dict[str, list[int]] = {}
    whole = own = 0
    for variable, holder in zip(variables, held, strict=True):
        if holder is None:
            size = of_rank = bytes_of(variable)
            how = "whole"
        else:
            (size, of_rank), how = holder.bytes, _layout(holder)
        whole, own = whole + size, own + of_rank
        by_layout.setdefault(how, []).append(size)
    shares = [
        f"{_bytes(sum(sizes))} {how} ({len(sizes)} variables)"
        for how, sizes in by_layout.items()
    ]
    mesh: Mapping[str, int] = next(
        (h.ranks.mesh.sizes for h in held if h is not None), {}
    )
    axes = ", ".join(f"{name} {size}" for name, size in mesh.items())
    return (
        f"{model.name!r} and its optimizer over the mesh ({axes}): a rank holds "
        f"{_bytes(own)} of {_bytes(whole)}: {', '.join(shares)}"
    )


def _layout(holder: Any) -> str:
    cut = ", ".join(repr(axis) for axis in holder.layout.cut)
    how = [f"cut along {cut}"] if cut else []
    how += (
        [f"in pieces over {holder.ranks.mesh.batch!r}"]
        if holder.layout.in_pieces
        else []
    )
    return " and ".join(how)


def _bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"
