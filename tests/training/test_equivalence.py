"""The promise: the same trained model for every backend that sums the gradients.

Plain, this file compares the backends that live in one process. Then it starts itself on 2, 3
and 4 ranks of each backend of several processes; those ranks find the name of theirs in the
environment. A new backend needs a word in ``tests.launch.LAUNCHERS``.
"""

from __future__ import annotations

import os
import traceback

import numpy as np
import pytest
import tensorflow as tf

from collective.errors import CollectiveError
from collective.training.partition.mesh.ranks import groups_along
from tests import launch
from tests.training.cases import CASES, PRECISIONS, differences, train
from tests.training.mesh_on_ranks import check_group, check_mesh

HERE = "tests/training/test_equivalence.py"
# The first is one process that divides every batch into four micro-batches.
IN_PROCESS = (
    "single",
    "tf-one-device",
    "tf-mirrored:2",
    "tf-mirrored:4",
    "tf-central-storage:2",
    "tf-central-storage:4",
)
NAMES = (os.environ[launch.BACKEND],) if launch.launched() else IN_PROCESS
# Cases that depend on the number of replicas have tf-mirrored as their reference.
COMPARED = [c for c in CASES if launch.launched() or not c.replicas_matter]
# Backends that share most with another run all cases in make test-equivalence only.
SOME = {
    "single": {"accumulate", "auc", "loss-scaling", "masked", "weighted-mean"},
    "tf-one-device": {"accumulate-empty-replica"},
    "tf-mirrored:2": {
        "accumulate",
        "adamw-ema",
        "embedding",
        "global-clipnorm",
        "loss-scaling",
        "masked",
        "two-inputs-two-outputs",
        "weighted-mean",
    },
    "tf-central-storage:2": {"accumulate-empty-replica", "adamw-ema", "loss-scaling"},
    "tf-central-storage:4": set(),
    "tf-mirrored:4": {"accumulate-empty-replica"},
}
IN_FLOAT32 = {"masked"}


def on(name, case, precision):
    """Return a parameter set; only for make test-equivalence if others show the same.

    In one process, float32 differs from float64 only by its rounding: two replicas show
    this for some cases.
    """
    left = case.name not in SOME.get(name, {case.name})
    if not launch.launched() and precision == "float32":
        left = name != "tf-mirrored:2" or case.name not in IN_FLOAT32
    marks = [pytest.mark.matrix] if left else []
    values = (name, case, precision)
    return pytest.param(*values, id=f"{name}-{case.name}-{precision}", marks=marks)


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    return backends_by_name(request.param)


def together(backend, function, *arguments):
    """Call a function; if it fails, perhaps on one rank only, end the job at once."""
    try:
        return function(*arguments)
    except CollectiveError:
        raise  # this error reaches every rank
    except Exception:
        if backend.size > 1:
            traceback.print_exc()
            backend.abort(1)
        raise


@pytest.mark.parametrize(
    "backend, case, precision",
    [on(n, c, p) for n in NAMES for c in COMPARED for p in PRECISIONS],
    indirect=["backend"],
)
def test_trains_what_one_process_trains(case, precision, backend, reference):
    alone = backend.replicas == 1
    wanted = reference(case, precision, backend.replicas)
    got = together(backend, train, case, backend, precision, 4 if alone else None)
    assert differences(got, wanted, precision) == []


def test_sums_what_ranks_hold(backend):
    """Replicas have different values; some tensors are empty or scalar; both floats."""
    shapes = [(), (3,), (0,), (2, 5), (70, 3)]

    def tensors(replica, dtype):
        return [
            tf.cast(replica + 1, dtype) ** (i + 1) * tf.ones(s, dtype)
            for i, s in enumerate(shapes)
        ]

    for dtype in (tf.float32, tf.float64):

        @tf.function(autograph=False)
        def total(dtype=dtype):
            def replica():
                return backend.all_reduce(
                    tensors(tf.cast(backend.replica(), tf.int32), dtype)
                )

            return backend.run(replica, ())

        got = together(backend, total)
        for i, (value, shape) in enumerate(zip(got, shapes, strict=True)):
            wanted = sum((r + 1) ** (i + 1) for r in range(backend.replicas))
            assert value.dtype == dtype and value.shape == shape
            np.testing.assert_array_equal(value, np.full(shape, wanted))


def test_every_rank_gets_the_values_of_rank_zero(backend):
    with backend.scope():
        variables = [
            tf.Variable(np.full(shape, backend.rank + 1.5), dtype=dtype)
            for shape in ((), (3, 2))
            for dtype in ("float32", "float64")
        ]
    together(backend, backend.broadcast, variables)
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, 1.5))


def has_groups(backend):
    """Whether the backend is that of several ranks, with a replica in each."""
    return backend.size > 1 and len(backend.local_replicas) == 1


def test_ranks_in_groups(backend):
    if not has_groups(backend):
        pytest.skip("one process")
    size = backend.size
    for sizes in ({"a": size, "b": 1}, {"a": -(-size // 2), "b": size // 2}):
        if sizes["a"] * sizes["b"] != size:
            sizes = {"a": 1, "b": size}
        for axis in sizes:
            together(backend, check_group, backend, groups_along(sizes, axis))
    uneven = [list(range(1, size)), [0]]
    together(backend, check_group, backend, uneven)


def test_a_mesh_of_ranks(backend):
    if not has_groups(backend):
        pytest.skip("one process")
    replicas = 2 if backend.size == 4 else 1
    together(backend, check_mesh, backend, replicas, backend.size // replicas)


def needing(name: str):
    """Return a backend, which is skipped if its library is not installed."""
    return pytest.param(name, marks=[pytest.mark.horovod] if name == "horovod" else [])


@pytest.mark.launches
@pytest.mark.parametrize(
    "name",
    [
        needing(name)
        if name in ("native", "horovod")
        else pytest.param(name, marks=pytest.mark.matrix)
        for name in launch.LAUNCHERS
    ],
)
def test_on_two_ranks_in_float64(name, reference):
    on_ranks(name, 2, reference, ["float64"])


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", [needing(name) for name in launch.LAUNCHERS])
def test_on_ranks(name, ranks, reference):
    on_ranks(name, ranks, reference, PRECISIONS)


# The backends share one step, and differ in the sum.
BRIEFLY = [
    "sgd",
    "global-clipnorm",
    "empty-replica",
    "masked",
    "batchnorm",
    "two-inputs",
]


def on_ranks(name, ranks, reference, precisions):
    pytest.importorskip("mpi4py")
    cases, chosen = CASES, []
    if precisions != PRECISIONS:
        cases = [c for c in CASES if any(word in c.name for word in BRIEFLY)]
        chosen = ["-k", f"{precisions[0]} and ({' or '.join(BRIEFLY)}) or not float"]
    for case in cases:
        for precision in precisions:
            reference(case, precision, ranks)
    least = 8 if chosen else len(CASES) * len(precisions)
    ended = launch.launch(name, ranks, [HERE, *chosen], reference.folder, seconds=420)
    assert ended.passed() > least
