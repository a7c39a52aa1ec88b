"""All programs in one table; stock Keras and we train each, and they are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import collective
from collective.training.steps.distributed import distributed
from collective.training.steps.settings import StepSettings
from tests.training.programs import (
    calls,
    coupling_layers,
    coupling_steps,
    hard,
    losses,
    normalized,
    own_steps,
    plain_steps,
    program,
)

assert plain_steps and coupling_steps  # these add to the programs of own_steps


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        make: Makes the compiled model.
        data: Makes ``x, y`` or ``x, y, sample_weight``, or a data set.
        call: The compared method.
        words: Its arguments in addition to the data.
        callbacks: Makes the callbacks of one training of a model.
        tolerance: Relative to the largest entry of each tensor, or to one.
    """

    make: Callable[[], keras.Model]
    data: Callable[[], tuple[Any, ...]]
    call: str = "fit"
    words: Callable[[], dict[str, Any]] = dict
    callbacks: Callable[[keras.Model], list[Any]] = lambda model: []
    floatx: str = "float64"
    tolerance: float = 1e-10
    arguments: dict[str, Any] = field(default_factory=dict)


def _hard(one: program.Program) -> Case:
    def words() -> dict[str, Any]:
        more = one.data(program.VALIDATED, 2) if one.validates else None
        return {"validation_data": more, "validation_batch_size": program.VALIDATED}

    return Case(
        lambda: program.made(one),
        lambda: one.data(program.ROWS, 1),
        words=words,
        callbacks=one.callbacks,
        floatx=one.floatx,
        tolerance=one.tolerance,
    )


def _own_step(make: Callable[[], Any]) -> Case:
    return Case(lambda: make()[0], lambda: make()[1])


def _coupled(make: Callable[[], Any], data: Callable[..., Any], rows: int) -> Case:
    """Return a case of 31 rows in batches of ten: the last one leaves ranks without rows."""
    return Case(
        lambda: make()(),
        lambda: data(rows),
        words=lambda: {"validation_data": data(17 if rows > 30 else 20, 9)},
    )


def _call(one: calls.Program) -> Case:
    def data() -> tuple[Any, ...]:
        given = tuple(one.data())
        return given[:1] if one.call == "predict" else given

    def callbacks(model: keras.Model) -> list[Any]:
        if not one.raises:
            return []
        raising = lambda *_: model.raise_weight()  # noqa: E731
        return [keras.callbacks.LambdaCallback(on_epoch_end=raising)]

    batch = {"batch_size": calls.BATCH}
    return Case(one.make, data, one.call, lambda: batch | one.words, callbacks)


def _all() -> dict[str, Case]:
    found = {name: _hard(one) for name, one in hard.PROGRAMS.items()}
    found |= {f"{n}, own step": _own_step(one) for n, one in own_steps.PROGRAMS.items()}
    for module in (losses, coupling_layers, normalized):
        for name, (make, data) in module.CASES.items():
            rows = 30 if name == "two-outputs" else 31
            found[f"{name}, {module.__name__.split('.')[-1]}"] = _coupled(
                make, data, rows
            )
    found |= {f"{n}, {one.call}": _call(one) for n, one in calls.PROGRAMS.items()}
    return found


CASES = _all()


def outcome(case: Case, backend: Any = None, **options: Any) -> dict[str, np.ndarray]:
    """Return the call's result, and every variable after it.

    Args:
        backend: It divides the rows of each batch. If None, stock Keras runs.
        options: Options of ``collective.fit``; without any, Keras' own call runs.
    """
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx(case.floatx)
    keras.utils.set_random_seed(5)
    model, data = case.make(), case.data()
    words: dict[str, Any] = {"verbose": 0}
    if case.call == "fit":
        words |= {"epochs": 2, "shuffle": False, "callbacks": case.callbacks(model)}
        if len(data) == 3:
            *data, words["sample_weight"] = data
    if not isinstance(data[0], tf.data.Dataset) and not hasattr(data[0], "__next__"):
        words["batch_size"] = program.BATCH
        words |= case.words()
    else:
        words |= {k: v for k, v in case.words().items() if k != "batch_size"}
    if backend is None:
        found = getattr(model, case.call)(*data, **words)
    elif not options:
        with distributed(StepSettings(backend)):
            found = getattr(model, case.call)(*data, **words)
    else:
        call = getattr(collective, case.call)
        found = call(model, *data, backend=backend, **words, **options)
    logs = found.history if case.call == "fit" else {"returned": found}
    values = {
        f"{name} {i}": np.asarray(value)
        for name, kept in logs.items()
        for i, value in enumerate(tf.nest.flatten(kept))
    }
    for i, variable in enumerate(model.variables):
        if "seed_generator" not in variable.path:
            values[f"{i} {variable.name}"] = np.array(variable)
    return values


def differences(
    case: Case, got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]
) -> list[str]:
    """Return differences beyond the program's tolerance; empty if there are none."""
    assert set(got) == set(wanted)
    found = []
    for name, reference in wanted.items():
        if got[name].dtype.kind in "iub":
            error = 0.0 if np.array_equal(got[name], reference) else np.inf
        else:
            # Absolute below one, because a sum that cancels leaves only rounding.
            scale = max(np.abs(reference).max(initial=0), 1.0)
            error = np.abs(got[name] - reference).max(initial=0) / scale
        if not error <= case.tolerance:
            found.append(f"{name}: {error:.2g} of {reference!r}, got {got[name]!r}")
    return found
