"""What the ranks of an elastic script do together, while some of them die at any moment."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.elastic.preemption import LEAVES, WAITING
from collective.errors import CollectiveError
from collective.training.unedited import growth
from collective.training.unedited.script_job import ScriptJob
from collective.training.verification.same_calls import share_weights
from tests.training.unedited import ranks_in_threads
from tests.training.unedited.ranks_in_threads import Rank

KINDS = (
    *("step", "early step", "step", "assign", "overrun", "save", "remove"),
    *("decide", "share", "eager", "meet"),
)
SAME = [kind for kind in KINDS if kind != "share"]  # on every rank


class Program:
    """A step that sums over the ranks, and writes two variables."""

    def __init__(self, script: Script, early: bool):
        self._script, self._early = script, early
        self.variables = [v._value for v in script.variables]
        self.written, self.own_variables = self.variables, ()
        self.traffic = SimpleNamespace(writes_early=early)
        self.has_run, self.attached, self.report = False, (), None

    def __call__(self, tensors: Sequence[float], number: int) -> Any:
        rank, (first, second) = self._script.rank, self.variables
        announced = np.zeros(5)
        announced[rank.rank] = self._script.units._announced.numpy()
        total, *announced = rank.sum(np.array([tensors[0] / rank.size, *announced]))
        if self._early:
            first.assign(first * 0.9 + total)
            total = rank.sum(np.array(float(first.numpy()) / rank.size))
        else:
            first.assign(first * 0.9 + total)
        second.assign(second + total)
        self.has_run, self.attached = True, (np.array(announced), np.zeros(()))
        return {"loss": tf.constant(total)}


class Script:
    """A script of one rank, drawn by a seed."""

    def __init__(self, rank: Rank, kinds: Sequence[str], files: dict, leaves: Mapping):
        self.rank, self.kinds, self.files, self.leaves = rank, kinds, files, leaves
        self.job = ScriptJob(rank)
        self.units = self.job.units
        self.units._preemption.flags = self._flags
        self.variables = [keras.Variable(v, dtype="float64") for v in (0.5, 1.0)]
        self.reads = True  # its weights, between two steps
        self.admits_after = 0  # entries of ``seen``
        self.programs = Program(self, False), Program(self, True)
        self.seen: list[Any] = []

    def _flags(self) -> int:
        world, noticed = self.rank.world, self.units._preemption.noticed
        is_asked = self.rank.rank == 0 and bool(world.joining)
        is_asked &= len(self.seen) >= self.admits_after
        return LEAVES * noticed + WAITING * is_asked

    def run(self) -> Any:
        if self.rank.joins:
            self.units.join(self.rank.enter())
        for number, kind in enumerate(self.kinds):
            self.seen.append(kind)
            getattr(self, "_" + kind.replace(" ", "_"))(number)
            if self.leaves.get(self.rank.number) == number:
                self.units._preemption.noticed = True
        try:
            self.units.end_script()
        except CollectiveError as error:
            assert "died at the end of the script" in str(error)
        return [*self.seen, *(round(float(v.numpy()), 9) for v in self.variables)]

    def _step(self, number: int, early: bool = False) -> None:
        batch = SimpleNamespace(now=lambda: [number - 3])
        result = self.units.run_step(None, self.programs[early], batch, number)
        self.seen.append(round(float(result["loss"]), 9))

    def _early_step(self, number: int) -> None:
        self._step(number, early=True)

    def _assign(self, number: int) -> None:
        self.variables[0].assign(self.variables[0].value * 0.5 + number)

    def _overrun(self, number: int) -> None:
        self.units.before_overrun(self.programs[0])
        self.programs[0].variables[1].assign_add(
            1.0
        )  # as a graph: by no Keras variable

    def _save(self, number: int) -> None:
        value = float(self.variables[0].numpy()) if self.reads else number
        self.job.write(f"f{number}", lambda: self.files.update({f"f{number}": value}))

    def _remove(self, number: int) -> None:
        self._save(number)
        self.job.made.add(f"f{number}")

        def remove() -> None:
            if self.files.pop(f"f{number}", None) is None:
                raise FileNotFoundError

        self.job.remove([f"f{number}"], remove)

    def _decide(self, number: int) -> None:
        mine = np.array([float(number)])
        decided = self.units.run(lambda: self.rank.broadcast_array(mine))
        self.variables[1].assign_add(decided[0])

    def _share(self, number: int) -> None:
        if self.rank.number == 2:  # another weight than rank 0's, also after a death
            self.variables[1].assign_add(7.0)
        variables = [v._value for v in self.variables]
        share_weights(variables, self.rank, self.units.run)

    def _eager(self, number: int) -> None:
        self.variables[0].assign_add(number)
        with self.units.eager_step():
            pass

    def _meet(self, number: int) -> None:
        self.job.meet("Model.fit")


@pytest.fixture(autouse=True)
def restored() -> Iterator[contextlib.ExitStack]:
    """Undo, the last first, what the jobs of a test have replaced."""
    with contextlib.ExitStack() as stack:
        yield stack


def run(
    undone: contextlib.ExitStack,
    kinds: Sequence[str],
    size: int,
    deaths: Mapping[int, tuple[int, str]],
    seed: int = 0,
    leaves: Mapping[int, int] | None = None,
    joins: bool = False,
    admits_after: int = 0,
) -> tuple[list[Any], dict[str, float], ranks_in_threads.World]:
    """Run a script on ranks; return the different results of those that are left."""
    files: dict[str, float] = {}

    def program(rank: Rank) -> Callable[[], Any]:
        script = Script(rank, kinds, files, leaves or {})
        script.reads, script.admits_after = not joins, admits_after
        undone.callback(script.job.undo)
        return script.run

    results, world = ranks_in_threads.run(program, size, deaths, seed, joins)
    return ranks_in_threads.different(results), files, world


@pytest.mark.parametrize("kind", [k for k in dict.fromkeys(KINDS) if k != "early step"])
def test_a_rank_dies_at_each_collective(restored, kind):
    """Survivors have what one process has, whichever of them had seen the result."""
    kinds = ["step", kind, "early step", kind, "step"]
    wanted, wanted_files, world = run(restored, kinds, 3, {})
    assert len(wanted) == 1
    for number in range(1, world.made[0] + 1):
        victim, when = number % 3, ("before", "after")[number % 2]
        deaths = {victim: (number, when)}
        for seed in range(2):
            found, files, _ = run(restored, kinds, 3, deaths, seed)
            assert found == wanted, (deaths, seed)
            assert files == wanted_files, (deaths, seed)


@pytest.mark.parametrize("seed", range(6))
def test_several_ranks_die_or_leave(restored, seed):
    draw = random.Random(seed)
    size, kinds = draw.choice([3, 4]), draw.choices(SAME, k=8)
    wanted, wanted_files, world = run(restored, kinds, size, {})
    victims = draw.sample(range(size), size - 1)
    latest = max(world.made[0], 2)
    deaths = {
        v: (draw.randint(1, latest), draw.choice(["before", "after"])) for v in victims
    }
    leaves = {victims[0]: draw.randrange(8)} if seed % 2 else {}
    found, files, _ = run(restored, kinds, size, deaths, seed, leaves)
    assert found in (wanted, []) and files == wanted_files


@pytest.fixture
def ends_alone(monkeypatch):
    """A newcomer that leaves ends its thread, not the process."""

    def end(exit_code: int) -> None:
        raise ranks_in_threads.Killed

    monkeypatch.setattr(growth, "end_process", end)


ANSWERED = (
    "step",
    "early step",
    "overrun",
    "save",
    "remove",
    "decide",
    "share",
    "meet",
)


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_joins_while_others_die(restored, ends_alone, seed):
    """It runs the script from its start, and ends with the numbers of the others."""
    draw = random.Random(seed)
    size, kinds = draw.choice([2, 3]), ["step", *draw.choices(ANSWERED, k=9), "step"]
    admission = {"joins": True, "admits_after": draw.randrange(8)}
    wanted, wanted_files, world = run(restored, kinds, size, {}, **admission)
    assert len(wanted) == 1 and len(world.members) == size + 1
    for _ in range(3):
        latest = draw.randint(1, world.made[0])
        deaths = {draw.randrange(size): (latest, draw.choice(["before", "after"]))}
        found, files, _ = run(restored, kinds, size, deaths, seed, **admission)
        assert found in (wanted, []) and files == wanted_files, deaths


def test_a_newcomer_that_needs_the_weights_of_a_past_step_leaves(
    restored, ends_alone, capsys
):
    kinds = ["step", "assign", "step", "step", "assign"]
    wanted, *_ = run(restored, kinds, 2, {})
    found, _, world = run(restored, kinds, 2, {}, joins=True, admits_after=4)
    assert found == wanted and len(world.members) == 2
    printed = capsys.readouterr().err
    assert "a rank cannot join the job" in printed and "test_units.py" in printed
