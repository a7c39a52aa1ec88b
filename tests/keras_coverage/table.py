"""Every public object of Keras that takes part in a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import keras

from tests.keras_coverage import functions, layers, scores
from tests.keras_coverage.case import Case


@dataclass(frozen=True)
class Group:
    """The objects of a module.

    Attributes:
        module: The module of these public names.
        cases: Cases by name.
        excluded: The names that have no case, each with the reason.
    """

    module: ModuleType
    cases: Mapping[str, Case]
    excluded: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """Return the public names of the module."""
        return [name for name in dir(self.module) if not name.startswith("_")]


GROUPS = {
    "layers": Group(keras.layers, layers.CASES, layers.EXCLUDED),
    "losses": Group(keras.losses, scores.LOSSES, scores.NO_LOSSES),
    "metrics": Group(keras.metrics, scores.METRICS, scores.NO_METRICS),
    "optimizers": Group(
        keras.optimizers, functions.OPTIMIZERS, functions.NO_OPTIMIZERS
    ),
    "optimizers.schedules": Group(
        keras.optimizers.schedules, functions.SCHEDULES, functions.NO_SCHEDULES
    ),
    "activations": Group(
        keras.activations, functions.ACTIVATIONS, functions.NO_ACTIVATIONS
    ),
    "regularizers": Group(
        keras.regularizers, functions.REGULARIZERS, functions.NO_REGULARIZERS
    ),
    "constraints": Group(
        keras.constraints, functions.CONSTRAINTS, functions.NO_CONSTRAINTS
    ),
    "random": Group(keras.random, functions.RANDOM, functions.NO_RANDOM),
}


def missing() -> list[str]:
    """Return the public names that have neither a case nor a reason."""
    return [
        f"keras.{prefix}.{name}"
        for prefix, group in GROUPS.items()
        for name in group.names
        if name not in group.excluded and f"{prefix}.{name}" not in _KNOWN
    ]


def _all() -> tuple[dict[str, Case], dict[str, list[str]]]:
    """Return the cases by full name, and for each the other names of its object."""
    cases: dict[str, Case] = {}
    aliases: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    for prefix, group in GROUPS.items():
        ordered = sorted(group.names, key=lambda name: name not in group.cases)
        for name in ordered:
            full, found = f"{prefix}.{name}", getattr(group.module, name)
            if id(found) in first:
                aliases[first[id(found)]].append(full)
            elif name in group.cases:
                first[id(found)] = full
                cases[full], aliases[full] = group.cases[name], []
    return cases, aliases


CASES, ALIASES = _all()
_KNOWN = {*CASES, *(other for found in ALIASES.values() for other in found)}


def _grouped(most: int = 8) -> list[tuple[str, ...]]:
    """Return groups of objects for one model: a few of a module that are otherwise equal."""
    found: dict[object, list[str]] = {}
    for name, case in CASES.items():
        alone = name if case.optimizer is not None else None
        kind = name.rpartition(".")[0], case.floatx, case.tolerance, alone
        found.setdefault(kind, []).append(name)
    return [
        tuple(names[i : i + most])
        for names in found.values()
        for i in range(0, len(names), most)
    ]


GROUPED = _grouped()
