"""Verdicts on invented trainings."""

import numpy as np
import pytest

from collective.comparison.equality import ROUNDING, Recorded, judge
from collective.comparison.runs import undividable

STEPS, NAMES = 6, ["a/kernel", "a/bias"]


def training(moved=0.0, step=0, tensor=0):
    """Return a training whose tensor has moved, relative to its size, from a step on."""
    sizes = np.full((STEPS, 2), 4.0)
    sketches = np.linspace(1, 3, 2 * STEPS).reshape(STEPS, 2)
    sketches[step:, tensor] += moved * 4.0
    final = [np.full((3, 2), 2.0), np.zeros(2)]
    final[tensor].flat[0] += moved * max(1.0, final[tensor].max())
    losses = np.linspace(2, 1, STEPS)
    return Recorded(losses, list(NAMES), sketches, sizes, final)


def test_a_training_equals_itself():
    verdict = judge(training(), training(), 1e-12)
    assert verdict.equal and verdict.loss == verdict.parameter == 0
    assert verdict.first_step is None


@pytest.mark.parametrize("step, tensor", [(0, 0), (3, 1), (STEPS - 1, 0)])
def test_names_the_first_step_and_tensor(step, tensor):
    verdict = judge(training(), training(1e-9, step, tensor), 1e-12)
    assert not verdict.equal
    assert (verdict.first_step, verdict.first_tensor) == (step, NAMES[tensor])
    assert verdict.tensor == NAMES[tensor]
    assert verdict.parameter == pytest.approx(1e-9, rel=1e-3)


def test_rounding_is_what_another_order_does():
    other_order = training(1e-6, step=2)
    within = training(0.9 * ROUNDING * 1e-6, step=2)
    assert judge(training(), within, 1e-6, [other_order]).equal
    assert not judge(training(), within, 1e-6).equal
    early = training(0.9 * ROUNDING * 1e-6, step=1)
    verdict = judge(training(), early, 1e-6, [other_order])
    assert not verdict.equal and verdict.first_step == 1


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_what_is_not_finite_is_not_equal(broken):
    other = training()
    other.losses[2] = broken
    verdict = judge(training(), other, 1e-6)
    assert not verdict.equal and (verdict.first_step, verdict.first_tensor) == (
        2,
        "loss",
    )


def test_refuses_other_models():
    other = training()
    other.names[0] = "b/kernel"
    with pytest.raises(ValueError, match="different models"):
        judge(training(), other, 1e-6)


@pytest.mark.parametrize("batch, most", [(64, 2), (64, 4), (60, 8), (7, 1), (3, 4)])
def test_no_number_of_replicas_divides_the_batch_of_the_proof(batch, most):
    size = undividable(batch, most)
    assert size <= batch
    if batch > most > 1:
        assert all(size % n for n in range(2, most + 1))
