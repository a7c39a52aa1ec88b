"""Horovod's own tests and examples with the word replaced, on two ranks; prints a table.

    python -m tests.horovod_conformance CHECKOUT [--only NAME] [--horovod]

CHECKOUT is a clone of Horovod 0.28.1. Its tests need ``pip install mock parameterized``. With
--horovod everything runs on Horovod itself as well (make horovod): then a failure is expected
if Horovod fails, too; otherwise, if Horovod was known to fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.horovod_conformance import examples, port, signatures, suites
from tests.horovod_conformance.launch import HOROVOD, JOBS, ROOT, Job

TABLE = ROOT / "tests/collective/horovod_signatures.txt"
# Tests that fail on Horovod itself with Keras 3, and the reasons.
KNOWN = {
    "test_grad_aggregation_with_inf_grad": "optimizer._compute_gradients is Keras 2's",
    "test_gradient_aggregation_0": "the same",
    "test_gradient_aggregation_1": "the same",
    "test_gradient_aggregation_with_local_vars_0": "the same",
    "test_gradient_aggregation_with_local_vars_1": "the same",
    "test_partial_distributed_optimizer": "the same",
    "test_sparse_as_dense_with_grad_aggregation": "reads Horovod's _agg_helper",
    "test_legacy_optimizer": "Keras 3 has no legacy optimizers",
    "test_horovod_reducescatter_grad_cpu_process_sets": "float16: 0 is not below 1e-8",
}
# Tests that expect an error for a feature that this project has.
BEYOND = {
    "test_horovod_allreduce_indexed_slices_prescale_postscale_error": (
        "sparse tensors can be scaled here"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if only expected failures occurred."""
    parser = argparse.ArgumentParser("python -m tests.horovod_conformance")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="suites and examples with this in")
    parser.add_argument("--horovod", action="store_true", help="on Horovod itself, too")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parsed = parser.parse_args(arguments)
    found = sorted(set(signatures.read(parsed.checkout)))
    if parsed.write:
        comment = TABLE.read_text().splitlines()[0]
        TABLE.write_text("\n".join([comment, *found, ""]))
    bad = 0 if TABLE.read_text().splitlines()[1:] == found else 1
    print(f"signatures: {len(found)}, {'the table differs' if bad else 'as the table'}")
    with tempfile.TemporaryDirectory(prefix="horovod-conformance-") as name:
        jobs = (HOROVOD, *JOBS) if parsed.horovod else JOBS
        for word in {job.word for job in jobs}:
            port.copy(parsed.checkout, Path(name, word), word)
        for suite in suites.NAMES:
            if parsed.only in suite:
                bad += _suite(Path(name), parsed.checkout, jobs, suite)
        for example in examples.EXAMPLES:
            if parsed.only in str(example) or parsed.only in example.file:
                bad += sum([_example(Path(name), job, example) for job in jobs])
    return 1 if bad else 0


def _suite(folder: Path, checkout: Path, jobs: Sequence[Job], suite: str) -> int:
    """Run the suite in every way; return the number of unexpected failures."""
    bad = 0
    expected = {} if jobs[0].word == "horovod" else dict(KNOWN)
    for job in jobs:
        outcome = suites.outcome(folder / job.word, checkout, job, suite)
        _row(job, suite, outcome.summary)
        for test, why in outcome.failed.items():
            if job.word == "horovod":
                expected[test] = why
                print(f"    {test}: {why}", flush=True)
            elif (known := expected.get(test) or BEYOND.get(test)) is None:
                bad += 1
                print(f"    NOT EXPECTED {test}: {why}", flush=True)
            else:
                print(f"    {test}: {why} (expected: {known})", flush=True)
    return bad


def _example(folder: Path, job: Job, example: examples.Example) -> int:
    own_launcher = example.how not in ("ranks", "service")
    if own_launcher and job.name != "collectiverun":
        return 0
    result, printed = examples.result(folder / job.word, job, example)
    _row(job, str(example), result)
    for line in printed.splitlines():
        print(f"    {line}", flush=True)
    return int(bool(printed) and job.word != "horovod")


def _row(job: Job, what: str, result: str) -> None:
    print(f"{what:58} {job.name:20} {result}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
