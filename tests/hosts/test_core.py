"""The tests of the collectives, on hosts that only messages join."""

from __future__ import annotations

from functools import partial

import pytest

from tests import launch

FOLDER = "tests/collective"
FILES = [
    f"{FOLDER}/test_{name}.py"
    for name in ("allreduce", "others", "process_sets", "agreement")
]


# On one host with two ranks and one with one, there is one lane only.
@pytest.mark.parametrize("slots", [[2, 2], [2, 1]], ids=["2+2", "2+1"])
def test_on_two_hosts(slots, hosts, tmp_path):
    run_on(hosts, slots, FILES, tmp_path)


def test_on_four_hosts(hosts, tmp_path):
    run_on(hosts, [1, 1, 1, 1], FILES, tmp_path)


def test_tensorflow_and_the_backend_on_two_hosts(hosts, tmp_path):
    files = [f"{FOLDER}/test_{name}.py" for name in ("tensorflow", "backend")]
    run_on(hosts, [2, 2], [*files, "-k", "not many_runs and not idle"], tmp_path)


def run_on(lab, slots, tests, tmp_path):
    ended = launch.launch(
        "native",
        sum(slots),
        tests,
        tmp_path,
        seconds=200,
        start=partial(lab.mpirun, slots),
    )
    assert ended.code == 0, ended.output
    assert len(ended.outcomes[0]) > 20
    assert set(ended.outcomes[0].values()) <= {"passed", "skipped"}
    assert all(outcomes == ended.outcomes[0] for outcomes in ended.outcomes)
