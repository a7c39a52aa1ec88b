"""Tests of several files on two ranks, by one launch.

A launch takes seconds, so files whose tests need the same ranks share one. More ranks and
other backends are in the files themselves, among the tests that ``make test`` leaves out. So
are the cases of a test here of which another one does the same and more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import launch

#: By file: its tests that run on ranks (all, if empty), and how many pass there.
TESTS = {
    "test_again.py": (["test_trained_again_it_is_not_traced_again"], 1),
    "test_eager.py": ([], 6),
    "test_text_inputs.py": ([], 2),
    "test_transport.py": (
        [
            "test_a_scaled_sum_overflows_as_in_one_process",
            "test_one_step_differs_in_the_kernels_alone",
        ],
        2,
    ),
    "memory/test_remat.py": ([], 2),
    "programs/test_own_steps.py": (
        [
            "test_an_optimizer_sees_each_look_up",
            "test_its_own_test_step_validates",
            "test_noise_leaves_ranks_alike",
            "test_not_finite_is_reported_on_every_rank",
            "test_resumed_within_an_epoch_it_is_the_uninterrupted_run",
        ],
        6,
    ),
    "programs/test_program_details.py": (
        [
            "test_an_overflow_in_transport_is_named",
            "test_an_untracked_generator_draws_anew_in_each_step",
            "test_a_variable_of_no_layer_counts_the_steps",
        ],
        3,
    ),
    "verification/test_stock_run.py": (
        ["test_replicas_equal_keras", "test_what_differs_is_shown"],
        4,
    ),
    "verification/test_ranks_differ.py": ([], 39),
}


#: Cases for the matrix.
BESIDE = {
    "test_eager.py::test_trains_what_keras_trains[Model]",
    "test_text_inputs.py::test_trains_what_keras_trains[looked_up]",
    "memory/test_remat.py::test_trains_what_keras_trains[1]",
    "programs/test_own_steps.py::test_an_optimizer_sees_each_look_up[False]",
    "verification/test_stock_run.py::test_replicas_equal_keras[arrays]",
}


@pytest.mark.launches
@launch.NOT_ON_RANKS
@launch.NEEDS_CORE
@pytest.mark.parametrize(
    "beside",
    [pytest.param({*()}, marks=pytest.mark.matrix), BESIDE],
    ids=["all", "few"],
)
def test_on_two_ranks(beside, tmp_path):
    chosen = [f"--deselect=tests/training/{test}" for test in beside]
    for file, (names, _) in TESTS.items():
        path = f"tests/training/{file}"
        chosen += [f"{path}::{name}" for name in names] or [path]
    ended = launch.launch("native", 2, chosen, tmp_path, seconds=900)
    for file, (_, count) in TESTS.items():
        path = f"tests/training/{file}::"
        own = [
            {name: outcome for name, outcome in each.items() if name.startswith(path)}
            for each in ended.outcomes
        ]
        count -= sum(test.startswith(f"{file}::") for test in beside)
        assert replace(ended, outcomes=own).passed(skips=True) == count, file
