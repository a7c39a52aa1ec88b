"""A suite that a broken sum does not turn red proves nothing.

Where every rank holds the same data, "multiply by N" is a perfect all-reduce. It is
put in place of each backend's own here, and every case must notice.
"""

from __future__ import annotations

import pytest

from tests import checkout, launch, mutations
from tests.training.cases import CASES
from tests.training.test_equivalence import HERE

# One of each kind: plain, clipped, with state, with weights, with micro-batches.
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
        [*tests, "-m", ""],  # also those that make test leaves out
        reference.folder,
        seconds=120,
        **{launch.MUTATION: "multiply"},
    )
    assert ended.code not in (0, None), ended.output
    for outcomes in ended.outcomes:
        assert outcomes == dict.fromkeys(tests, "failed"), ended.output
