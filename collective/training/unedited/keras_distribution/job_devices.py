"""The devices and processes that ``keras.distribution`` shows a script: those of the job.

Each replica is one device, in the order of the ranks, as on JAX each process has all
devices of the job in view.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.partition.mesh.layouts import Mesh
from collective.training.unedited.script_job import ScriptJob


def replace_keras_distribution(job: ScriptJob) -> None:
    """Have ``keras.distribution`` know the job, until ``job.undo``."""
    backend = job.backend

    def list_devices(device_type: str | None = None) -> list[str]:
        kind = (device_type or _default_kind()).lower()
        if kind != "cpu" and not tf.config.list_physical_devices(kind.upper()):
            return []
        return [f"{kind}:{replica}" for replica in range(backend.replicas)]

    def initialize(
        job_addresses: str | None, num_processes: int | None, process_id: int | None
    ) -> None:
        _check_process(job, num_processes, process_id)

    functions: dict[str, Any] = {
        "list_devices": list_devices,
        "get_device_count": lambda device_type=None: len(list_devices(device_type)),
        "initialize": initialize,
        "num_processes": lambda: backend.size,
        "process_id": lambda: backend.rank,
        "distribute_tensor": _distribute_tensor,
    }
    job.replace(*keras_compat.distribution.backend_module(functions))
    kind = keras_compat.distribution.distribution_class()
    job.replace(kind, "__init__", _making(kind.__init__))
    stock = keras.distribution.set_distribution
    for place in keras_compat.entry_points.places_of(stock):
        job.replace(*place, _setting(job, stock))


def check_current(job: ScriptJob) -> None:
    """Refuse a distribution that the script has set and this job cannot be."""
    found = keras_compat.distribution.current_distribution()
    if found is not None:
        check(job, found)


def check(job: ScriptJob, distribution: Any) -> None:
    """Reject a distribution that would have no effect, or a different one.

    Raises:
        UsageError: The distribution has other devices than the job, or keeps data
            apart; or lays weights out, and this job cannot.
    """
    kind, replicas = type(distribution).__name__, job.backend.replicas
    devices = distribution.device_mesh.devices.size
    if devices not in job.replica_counts:  # ranks may have died since it was made
        raise UsageError(
            f"the script's {kind} has {devices} devices, and this job {replicas}",
            hint=f"keras.distribution.{kind} over keras.distribution.list_devices(), or "
            f"-np {devices}",
        )
    if not distribution.auto_shard_dataset:
        raise UsageError(
            f"the script's {kind} has auto_shard_dataset=False: each process would have "
            "a part of every batch of its own",
            hint="leave it out, and give every process the whole data: each computes "
            "its rows of every batch",
        )
    _check_layouts(job, distribution)


def _check_layouts(job: ScriptJob, distribution: Any) -> None:
    """Refuse a layout map that no variable would follow."""
    layout_map = keras_compat.distribution.layout_map_of(distribution)
    if layout_map is not None and job.placing is not None and not job.placing.by_map:
        raise UsageError(
            f"the script's {type(distribution).__name__} lays weights out, and so does "
            "tensor_parallel",
            hint="drop --set tensor_parallel",
        )
    if layout_map is None or job.placing is not None or job.backend.replicas == 1:
        return
    mesh = Mesh.of(distribution.device_mesh, distribution.batch_dim_name)
    names = {axis for layout in layout_map.values() for axis in layout.axes}
    if any(mesh.sizes.get(name, 1) > 1 for name in names - {None}):
        raise UsageError(
            f"the script's {type(distribution).__name__} lays weights out over "
            f"{job.backend.replicas} replicas, and {job.why_not_placing}",
            hint="collectiverun -np 2 --keras script.py, without --min-np and --resume; "
            "or keras.distribution.DataParallel() in the script",
        )


def _default_kind() -> str:
    return "gpu" if tf.config.list_physical_devices("GPU") else "cpu"


def _check_process(job: ScriptJob, processes: int | None, process: int | None) -> None:
    rank, size = job.backend.rank, job.backend.size
    for what, asked, found in (
        ("num_processes", processes, size),
        ("process_id", process, rank),
    ):
        if asked is not None and int(asked) != found:
            raise UsageError(
                f"keras.distribution.initialize({what}={asked}) on rank {rank} of {size}",
                hint="keras.distribution.initialize() without arguments: the launcher "
                "has set them, as collectiverun -np",
                everywhere=what == "num_processes",
            )


def _distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Return the tensor: its layout changes no value, and the partition finds one itself."""
    return tensor


def _making(stock: Any) -> Any:
    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        # Keras' adapters would cut a data set that fit cuts.
        self._is_multi_process = False

    return init


def _setting(job: ScriptJob, stock: Any) -> Any:
    @functools.wraps(stock)
    def set_distribution(value: Any) -> None:
        if value is not None:
            check(job, value)
        stock(value)

    return set_distribution
