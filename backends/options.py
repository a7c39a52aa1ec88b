"""Everything a user may choose about a backend, in one flat record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options of all backends.

    An option that the chosen backend does not take is an error.

    Attributes:
        threads: Threads for TensorFlow's operations; None: this process' share of the
            cores. Every backend takes it.
        parameter_servers: Ranks that hold variables (tf-parameter-server). None: one.
        communication: ``auto``, ``ring`` or ``nccl`` (tf-multiworker).
        devices: Number of local devices (in-process backends only): GPUs or, if there
            are none, logical CPU devices. None: the GPUs, or 2.
        cross_device_ops: ``auto``, ``nccl``, ``hierarchical-copy`` or
            ``reduction-to-one-device`` (tf-mirrored). ``auto`` is NCCL for GPUs and,
            for CPU devices, reduction to one device: TensorFlow's default for them
            takes three to five times as long.
        tensor_parallel: Ranks that share rows, and of which each has a part of the
            weights (native, mpi); see ``docs/how-to/parallel.md``.
        bucket_bytes: Sums the gradients in buckets of about so many bytes, the first
            ones while the rest is computed (native, mpi, horovod, tf-multiworker). By
            default buckets of 4 MiB between hosts (tf-multiworker: 16 MiB on GPUs; mpi:
            one bucket), and one bucket on one host.
        min_np: The job continues while so many ranks live (native, mpi). None: the
            launcher's ``--min-np``; without it, a rank that dies ends the job.
        max_np: How many ranks there may ever be (native, mpi). None: the launcher's
            ``--max-np``; without it, no rank joins later.
        algorithm: The algorithm of the all-reduce, as for ``collective.allreduce``
            (native).
        transport_dtype: ``float16`` or ``bfloat16``: the dtype in which float32
            gradients of 1024 elements or more travel (native). None: their own.
    """

    threads: int | None = None
    parameter_servers: int | None = None
    communication: str = "auto"
    devices: int | None = None
    cross_device_ops: str = "auto"
    tensor_parallel: int = 1
    bucket_bytes: int | None = None
    min_np: int | None = None
    max_np: int | None = None
    algorithm: str = "auto"
    transport_dtype: str | None = None
