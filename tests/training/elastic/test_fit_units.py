"""What the ranks of ``collective.fit`` do together, while some of them die at any moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.elastic.preemption import LEAVES
from collective.errors import LeaveJob
from collective.training.observers.elastic.fit_units import FitUnits
from tests.training.unedited import ranks_in_threads
from tests.training.unedited.ranks_in_threads import Rank

KINDS = ("step", "early step", "share", "decide", "between")


class Program:
    """A step that sums over the ranks, writes two variables and has a report."""

    own_variables, report = (), None

    def __init__(self, script: Script, early: bool):
        self._script, self._early = script, early
        self.variables = [v._value for v in script.variables]
        self.traffic = SimpleNamespace(writes_early=early)
        self.has_run, self.attached = False, ()

    def __call__(self, tensors: Sequence[float], number: int) -> Any:
        rank, (first, second) = self._script.rank, self.variables
        announced = np.zeros(5)
        announced[rank.rank] = self._script.units._announced.numpy()
        total, *announced = rank.sum(np.array([tensors[0] / rank.size, *announced]))
        first.assign(first * 0.9 + total)
        if self._early:
            total = rank.sum(np.array(float(first.numpy()) / rank.size))
        second.assign(second + total)
        self.has_run, self.attached = True, (np.array(announced),)
        self.report = tf.constant([total, number])
        return {"loss": tf.constant(total)}


class Training:
    """The training that its units are told of."""

    is_reading_over = False

    def __init__(self) -> None:
        self.step, self.changes = 0, 0

    def changed(self, root: int) -> None:
        self.changes += 1

    def continues_with(self, left: int) -> bool:
        return True


class Script:
    """A training of one rank."""

    def __init__(self, rank: Rank, kinds: Sequence[str], leaves: Mapping[int, int]):
        self.rank, self.kinds, self.leaves = rank, kinds, leaves
        self.units = FitUnits(rank)
        self.variables = [keras.Variable(v, dtype="float64") for v in (0.5, 1.0)]
        self.programs = Program(self, False), Program(self, True)
        self.training = Training()
        self.seen: list[Any] = []

    def run(self) -> Any:
        self.units.training = self.training
        self.units._preemption.flags = lambda: (  # type: ignore[method-assign]
            LEAVES * self.units._preemption.noticed
        )
        for number, kind in enumerate(self.kinds):
            if self.leaves.get(self.rank.number) == number:
                self.units._preemption.noticed = True
            getattr(self, "_" + kind.replace(" ", "_"))(number)
        return [*self.seen, *(round(float(v.numpy()), 9) for v in self.variables)]

    def _step(self, number: int, early: bool = False) -> None:
        batch, program = SimpleNamespace(now=lambda: [number - 3]), self.programs[early]
        function = SimpleNamespace(name="train_step")
        result = self.units.run_step(function, program, batch, number)
        self.training.step += 1
        self.seen += [round(float(result["loss"]), 9), program.report.numpy().tolist()]
        said, self.units.announced = self.units.announced, None
        leaving = [] if said is None else np.flatnonzero(said).tolist()
        if self.rank.rank in leaving:
            self.rank.leave()
            raise LeaveJob
        if leaving:
            self.units.change(leaving)

    def _early_step(self, number: int) -> None:
        self._step(number, early=True)

    def _share(self, number: int) -> None:
        """All ranks get what rank 0 says, in the variables themselves."""
        variables = [v._value for v in self.variables]

        def share() -> int:
            for variable in variables:
                variable.assign(self.rank.broadcast_array(np.array(float(number))))
            return number

        self.seen.append(self.units.run(share, variables))

    def _decide(self, number: int) -> None:
        mine = np.array([float(number)])
        decided = self.units.run(lambda: self.rank.broadcast_array(mine))
        self.variables[1].assign_add(decided[0])

    def _between(self, number: int) -> None:
        """An action that is given up where a rank dies; it changes nothing."""

        def act() -> bool:
            self.rank.broadcast_array(np.zeros(1))
            return False

        self._step(number)
        self.units.between_steps(act)


@pytest.fixture(autouse=True)
def restored() -> Iterator[contextlib.ExitStack]:
    """Undo, the last first, what the units of a test have replaced."""
    with contextlib.ExitStack() as stack:
        yield stack


def run(
    undone: contextlib.ExitStack,
    kinds: Sequence[str],
    deaths: Mapping[int, tuple[int, str]],
    seed: int = 0,
    leaves: Mapping[int, int] | None = None,
) -> tuple[list[Any], ranks_in_threads.World]:
    """Return the different results of the ranks that are left."""

    def program(rank: Rank) -> Any:
        script = Script(rank, kinds, leaves or {})
        undone.enter_context(script.units.serving(trains=True))
        return script.run

    results, world = ranks_in_threads.run(program, 3, deaths, seed)
    return ranks_in_threads.different(results), world


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_dies_at_each_collective(restored, kind):
    """Survivors have what one process has, whichever of them had seen the result."""
    kinds = ["step", kind, "early step", kind, "step"]
    if kind == "between":  # a rank that dies in it may leave others behind it
        kinds = ["step", kind, "step"]
    wanted, world = run(restored, kinds, {})
    assert len(wanted) == 1
    for number in range(1, world.made[0] + 1):
        deaths = {number % 3: (number, ("before", "after")[number % 2])}
        for seed in range(2):
            found, _ = run(restored, kinds, deaths, seed)
            assert found == wanted, (deaths, seed)


@pytest.mark.parametrize("leaver", range(3))
def test_a_rank_leaves_while_another_dies(restored, leaver):
    kinds = ["step", "decide", "step", "early step", "step"]
    leaves = {leaver: 2}
    wanted, world = run(restored, kinds, {}, leaves=leaves)
    assert len(wanted) == 1 and len(world.members) == 2
    victim = (leaver + 1) % 3
    for number in range(1, world.made[victim] + 1):
        deaths = {victim: (number, ("before", "after")[number % 2])}
        found, _ = run(restored, kinds, deaths, number, leaves)
        assert found == wanted, deaths
