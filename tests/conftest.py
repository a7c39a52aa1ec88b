"""Shared by all tests: devices, backends, and the results of one process."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from collective import library
from collective.backends.horovod import installed
from collective.errors import CollectiveError
from tests import launch
from tests.lean import stacks

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Logical devices can be made only once, before TensorFlow's first operation.
DEVICES = 4


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "launches: starts processes; not run on ranks, nor by make check"
    )
    config.addinivalue_line(
        "markers", "matrix: every backend on 3 and 4 ranks (make test-equivalence)"
    )
    config.addinivalue_line(
        "markers", "keras_coverage: all of Keras, object by object (make test-keras)"
    )
    config.addinivalue_line(
        "markers", "compares: runs compare.py whole (make test-compare)"
    )
    config.addinivalue_line(
        "markers", "installs: installs three MPIs from PyPI (make test-mpis)"
    )
    config.addinivalue_line(
        "markers", "builds: builds a wheel with the native core (make test-wheel)"
    )
    config.addinivalue_line(
        "markers", "trains: trains for seconds in this process; not in make check"
    )
    config.addinivalue_line(
        "markers",
        "on_ranks: make test runs it on ranks, which a launch starts; in one "
        "process it is one of the matrix",
    )
    config.addinivalue_line("markers", "waits: its job stands still for long")
    config.addinivalue_line("markers", "soak: a long training with kills (make soak)")
    config.addinivalue_line("markers", "horovod: needs Horovod (make horovod)")
    if not launch.launched():
        launch.redirect_dumps(config)
        if "PYTEST_XDIST_WORKER" not in os.environ:
            launch.redirect_segments(config)
            launch.prepare_forkserver(config)
        refuse_a_stale_core()
        # SIGTERM acts like SIGINT: the processes of tests end with the session.
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """Leave no garbage for pytest, which collects it at its end.

    Graphs have millions of objects, so that took seconds in each worker and each rank.
    """
    gc.freeze()


def refuse_a_stale_core() -> None:
    """Refuse a core from other sources, because its tests would prove nothing."""
    if not library.path().exists():
        return
    try:
        core = library.load()
    except CollectiveError as error:
        raise pytest.UsageError(str(error)) from None
    if library.stale(core):
        raise pytest.UsageError(
            f"{library.path()} was not built from the sources of this checkout\n"
            "HINT: make core; where that does nothing, remove the library first"
        )


# Names of tests that run on several replicas of one process contain this.
SEVERAL = "tf-mirrored"
# A test that asks for one of these fixtures trains a model.
TRAINING = {"clean_keras", "backends_by_name", "reference", "graphs_as_made"}


def proved_by_a_launch(item: pytest.Item) -> bool:
    """Return whether the launch of this test's file proves the same as the test alone."""
    if item.get_closest_marker("launches") or SEVERAL in item.nodeid:
        return False
    return item.get_closest_marker("on_ranks") is not None


def launches_between(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return an order in which each worker starts ranks at intervals until most is done.

    pytest-xdist cuts it into as many pieces as there are workers. A launch waits for most
    of its time, so that several at once, or some at the end, leave processors idle.
    """
    files: dict[Path, list[pytest.Item]] = {}
    others = []
    for item in items:
        if item.get_closest_marker("launches"):
            files.setdefault(item.path, []).append(item)
        else:
            others.append(item)
    # Whole files, because they share fixtures; first tests/training, the longest.
    ordered = [files[path] for path in sorted(files, reverse=True)]
    result: list[pytest.Item] = []
    for worker in range(workers):
        launches = [item for tests in ordered[worker::workers] for item in tests]
        until = len(items) * (worker + 1) // workers - len(launches)
        beside, others = others[: until - len(result)], others[until - len(result) :]
        while launches or beside:
            result += launches[:1] + beside[:4]
            launches, beside = launches[1:], beside[4:]
    return result + others


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Remove tests that start ranks from a rank, and mark the others."""
    for item in items:
        if TRAINING & set(getattr(item, "fixturenames", ())):
            item.add_marker("trains")
        if not launch.launched() and proved_by_a_launch(item):
            item.add_marker("matrix")
    if launch.launched():
        items[:] = [i for i in items if not i.get_closest_marker("launches")]
    yield  # the command line leaves tests out here
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        items[:] = launches_between(items, int(workers))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need Horovod if it is not installed."""
    if item.get_closest_marker("horovod") and (misfit := installed.misfit()):
        pytest.skip(f"{misfit}: make horovod")


@pytest.fixture(scope="session", autouse=True)
def devices() -> None:
    """Make the logical devices if any test imports TensorFlow."""
    if "tensorflow" in sys.modules:
        stacks.forget()
        if not launch.launched():
            import tensorflow as tf

            from collective.backends.devices import local_devices

            if launch.ON_GPU in os.environ:
                for gpu in tf.config.list_physical_devices("GPU"):
                    tf.config.experimental.set_memory_growth(gpu, True)
            else:
                tf.config.set_visible_devices([], "GPU")  # only make test-gpu uses GPUs
                local_devices(DEVICES)
    # Keras' and TensorFlow's own objects live for ever. Exclude them from collections,
    # which took more than a third of the time of all tests that trace a model.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.fixture(scope="session")
def backends_by_name() -> Iterator[Callable]:
    """Make backends; a launch has one, a plain session several: ``tf-mirrored:2``."""
    from collective import backends

    made: dict[str, backends.Backend] = {}

    def get(name: str) -> backends.Backend:
        if name not in made:
            kind, _, count = name.partition(":")
            made[name] = backends.get(
                kind, backends.Options(devices=int(count) if count else None)
            )
            if os.environ.get(launch.MUTATION) == "multiply":
                multiply_instead_of_summing(made[name])
        return made[name]

    yield get
    if launch.launched():
        for backend in made.values():
            backend.barrier()  # mpirun ends every rank as soon as one has failed


def multiply_instead_of_summing(backend) -> None:
    """Apply the mutation, which is right only if all replicas hold the same data."""
    backend._all_reduce = lambda tensors: [t * backend.replicas for t in tensors]
    if hasattr(backend, "sum_devices"):
        backend.sum_devices = lambda columns: [
            [t * backend.replicas for t in parts]
            for parts in zip(*columns, strict=True)
        ]


@pytest.fixture
def pretended_gpu(monkeypatch) -> None:
    """Have TensorFlow name a GPU that does not exist."""
    import tensorflow as tf

    real = tf.config.list_logical_devices
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind=None: ["a GPU"] if kind == "GPU" else real(kind),
    )


class Reference:
    """The results of the cases in one process, or on N logical devices of one.

    A plain session computes them when they are first needed; the ranks of a launch read the
    files that the session which started them has written to a folder.
    """

    def __init__(self, folder: Path, backend: Callable):
        self.folder = folder
        self.backend = backend
        self.cases: dict = {}

    def __call__(self, case, precision: str, replicas: int = 1) -> dict:
        known = self.cases.setdefault(case.name, case)
        assert known == case, f"two cases are named {case.name}"
        replicas = replicas if case.replicas_matter else 1
        file = self.folder / f"{case.name}-{precision}-{replicas}.npz"
        if not file.exists():
            from tests.training.cases import train

            assert not launch.launched(), f"no reference for this launch: {file}"
            name = f"tf-mirrored:{replicas}" if case.replicas_matter else "single"
            # Without micro-batches, unless they matter, too (batch statistics).
            parts = case.accumulate if case.replicas_matter else 1
            result = train(case, self.backend(name), precision, parts)
            # Renamed when complete: another worker may read it at any time.
            part = file.with_suffix(f".{os.getpid()}.npz")
            np.savez(part, *result.values(), names=np.array(list(result)))
            part.replace(file)
        with np.load(file) as saved:
            return {n: saved[f"arr_{i}"] for i, n in enumerate(saved["names"])}


@pytest.fixture(scope="session")
def shared_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the workers of a session have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def once(shared_path: Path) -> Callable[[str, Callable[[Path], None]], Path]:
    """Have a folder made by the first worker that asks for it by its name."""

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        path, part = shared_path / name, shared_path / f"{name}.part"
        with (shared_path / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                # Left by a worker that has failed.
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                make(part)
                part.rename(path)
        return path

    return folder


@pytest.fixture(scope="session")
def reference(backends_by_name: Callable, shared_path: Path) -> Reference:
    if folder := os.environ.get(launch.REFERENCE):
        return Reference(Path(folder), backends_by_name)
    path = shared_path / "reference"
    path.mkdir(exist_ok=True)
    return Reference(path, backends_by_name)


@pytest.fixture
def clean_keras() -> Iterator[None]:
    """Bring Keras to its state after import, before and after the test."""
    import keras

    # This does not collect garbage, which takes longer than most tests.
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
    yield
    keras.utils.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
