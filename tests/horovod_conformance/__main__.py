"""Horovod's own tests and examples with the word replaced, on two ranks; prints a table.

    python -m tests.horovod_conformance CHECKOUT [--only NAME]

CHECKOUT is a clone of Horovod 0.28.1. Its tests need ``pip install mock parameterized``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.horovod_conformance import port, signatures

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/collective/horovod_signatures.txt"
SECONDS = 1200
SUITES = (
    "test_tensorflow.py",
    "test_tensorflow_process_sets.py",
    "test_adasum_tensorflow.py",
    "test_tensorflow2_keras.py",
    "test_tensorflow2_keras_process_sets.py",
)
EXAMPLES = (
    "tensorflow2/tensorflow2_keras_mnist.py",
    "tensorflow2/tensorflow2_mnist.py",
    "elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py",
    "elastic/tensorflow2/tensorflow2_mnist_elastic.py",
)
LAUNCHERS = {
    "collectiverun": [sys.executable, "-m", "collective.launch", "-np", "2"],
    "mpirun": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"],
}
# Tests that fail on Horovod itself with Keras 3, and one where this project does more.
EXPECTED = {
    "test_grad_aggregation_with_inf_grad": "optimizer._compute_gradients is Keras 2's",
    "test_gradient_aggregation_0": "optimizer._compute_gradients is Keras 2's",
    "test_gradient_aggregation_1": "optimizer._compute_gradients is Keras 2's",
    "test_gradient_aggregation_with_local_vars_0": "the same",
    "test_gradient_aggregation_with_local_vars_1": "the same",
    "test_partial_distributed_optimizer": "optimizer._compute_gradients is Keras 2's",
    "test_sparse_as_dense_with_grad_aggregation": "reads Horovod's _agg_helper",
    "test_legacy_optimizer": "Keras 3 has no legacy optimizers",
    "test_horovod_reducescatter_grad_cpu_process_sets": "float16: 0 is not below 1e-8",
    "test_horovod_allreduce_indexed_slices_prescale_postscale_error": (
        "wants an error; here sparse tensors can be scaled"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing failed but what is expected to."""
    parser = argparse.ArgumentParser("python -m tests.horovod_conformance")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="suites and examples with this in")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parsed = parser.parse_args(arguments)
    found = sorted(set(signatures.read(parsed.checkout)))
    if parsed.write:
        comment = TABLE.read_text().splitlines()[0]
        TABLE.write_text("\n".join([comment, *found, ""]))
    bad = 0 if TABLE.read_text().splitlines()[1:] == found else 1
    print(f"signatures: {len(found)}, {'the table differs' if bad else 'as the table'}")
    with tempfile.TemporaryDirectory(prefix="horovod-conformance-") as name:
        port.copy(parsed.checkout, Path(name))
        for what, result, unexpected in _results(Path(name), parsed):
            print(f"{what:62} {result}", flush=True)
            for line in unexpected:
                print(f"    {line}", flush=True)
            bad += bool(unexpected)
    return 1 if bad else 0


def _results(
    copy: Path, parsed: argparse.Namespace
) -> Iterator[tuple[str, str, list[str]]]:
    for launcher, words in LAUNCHERS.items():
        for suite in SUITES:
            if parsed.only in suite:
                yield (
                    f"{launcher} {suite}",
                    *_suite(copy, parsed.checkout, words, suite),
                )
        for example in EXAMPLES:
            elastic = "elastic" in example
            if parsed.only in example and not (elastic and launcher == "mpirun"):
                more = ["--min-np", "1"] if elastic else []
                yield f"{launcher} {example}", *_example(copy, [*words, *more], example)


def _suite(
    copy: Path, checkout: Path, words: list[str], suite: str
) -> tuple[str, list[str]]:
    folder = copy / "test/parallel"
    code = (
        "import os, sys, pytest; from collective.environment import detect; "
        "rank = detect().rank; "
        f"file = open(f'{copy}/{suite}.{{rank}}', 'w'); os.dup2(file.fileno(), 1); "
        f"sys.exit(pytest.main(['-q', '-rfE', '-p', 'no:cacheprovider', '{suite}']))"
    )
    path = [str(ROOT), str(folder), str(copy / "test/utils"), str(checkout)]
    ended = _run([*words, sys.executable, "-c", code], folder, path)
    lines = [
        line
        for rank in range(2)
        for line in (copy / f"{suite}.{rank}").read_text().splitlines()
    ]
    failed = {
        match.group(1)
        for line in lines
        if (match := re.match(r"(?:SUB)?(?:FAILED|ERROR)\S* .*?(?:::(\w+)|$)", line))
    }
    summary = [line for line in lines if re.match(r"\d+ (passed|failed|skipped)", line)]
    unexpected = sorted(str(name) for name in failed if name not in EXPECTED)
    if ended is None:
        unexpected.append(f"no end within {SECONDS} s")
    return summary[0] if summary else "no result", unexpected


def _example(copy: Path, words: list[str], example: str) -> tuple[str, list[str]]:
    file = copy / "examples" / example
    runner = str(Path(__file__).with_name("example.py"))
    command = [*words, sys.executable, runner, str(file)]
    ended = _run(command, file.parent, [str(ROOT)])
    if ended is None:
        return "no end", [f"no end within {SECONDS} s"]
    same = ended.stdout.count("same weights")
    if ended.returncode == 0 and same == 2:
        return "same weights on both ranks", []
    return f"exit code {ended.returncode}", ended.stderr.splitlines()[-12:]


def _run(
    command: list[str], folder: Path, path: list[str]
) -> subprocess.CompletedProcess[str] | None:
    own = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *own]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main())
