"""A suite proves nothing if it passes with a broken sum.

If every rank holds the same data, "multiply by N" is a perfect all-reduce. Here it replaces
the sum of each backend, and every case must fail.
"""

from __future__ import annotations

import pytest

from tests import checkout, launch, mutations
from tests.training.cases import CASES
from tests.training.test_equivalence import HERE

# One case of each kind: plain, clipped, with state, weights, or micro-batches.
CHOSEN = ("sgd", "global-clipnorm", "accumulate", "weighted-mean", "batchnorm")
PRECISION = "float64"


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.name)
def test_there_is_code_to_mutate(mutation):
    assert mutations.place(checkout.ROOT, mutation).exists()


@pytest.mark.launches
@pytest.mark.parametrize("name, ranks", [("mpi", 2), ("tf-mirrored:2", 1)])
def test_multiplying_by_n_turns_every_case_red(name, ranks, reference):
    if ranks > 1:
        pytest.importorskip("mpi4py")
    for case in CASES:
        if case.name in CHOSEN:
            reference(case, PRECISION, 2)
    tests = [
        f"{HERE}::test_trains_what_one_process_trains[{name}-{case}-{PRECISION}]"
        for case in CHOSEN
    ]
    tests.append(f"{HERE}::test_sums_what_ranks_hold[{name}]")
    ended = launch.launch(
        name,
        ranks,
        [*tests, "-m", ""],  # includes those that make test leaves out
        reference.folder,
        seconds=120,
        **{launch.MUTATION: "multiply"},
    )
    assert ended.code not in (0, None), ended.output
    for outcomes in ended.outcomes:
        assert outcomes == dict.fromkeys(tests, "failed"), ended.output
