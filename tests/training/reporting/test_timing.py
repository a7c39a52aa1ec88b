"""The use of time, computed from invented steps."""

import numpy as np
import pytest

from collective.training.loop.times import PARTS, Timing


def test_the_parts_add_up_to_a_step_and_leave_first_and_hiccup_out():
    steps = 12
    timing = Timing(rows=[8] * steps)
    rng = np.random.default_rng(0)
    for number in range(steps):
        factor = 1000.0 if number in (0, 5) else rng.uniform(0.9, 1.1)
        wait = factor * rng.choice([0.0, 0.2])
        timing.input.append(0.1 * factor)
        timing.step.append(1.5 * factor + wait)
        timing.all_reduce.append(0.3 * factor + wait)
        timing.update.append(0.2 * factor)
        timing.wait.append(wait)
    parts = timing.per_step()
    assert tuple(parts) == PARTS and min(parts.values()) >= 0
    totals = np.sort(timing.seconds())
    middle = totals[len(totals) // 4 : len(totals) - len(totals) // 4]
    assert sum(parts.values()) == pytest.approx(middle.mean())
    assert parts["all_reduce"] == pytest.approx(0.3, rel=0.1)
    assert parts["compute"] == pytest.approx(1.0, rel=0.1)
    assert 0 < parts["wait"] < 0.2


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_few_steps_are_enough(steps):
    ones = [1.0] * steps
    timing = Timing(ones[:], ones[:], ones[:], ones[:], ones[:], rows=[8] * steps)
    assert sum(timing.per_step().values()) == pytest.approx(2.0 * bool(steps))
