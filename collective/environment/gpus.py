"""GPUs of this host: those that the job may use, and those that one rank gets.

This needs no TensorFlow and no driver call. Files of the kernel drivers say how many
GPUs there are, and the variables that schedulers set say which of them may be used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from collective.environment.base import Environment

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")
# TensorFlow for AMD reads the second; a scheduler may set either.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_OF_HOST = "COLLECTIVE_HOST_GPUS"


def granted(variables: Mapping[str, str] | None = None) -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` does.

    Returns:
        Numbers or UUIDs; empty without a GPU, or if the variable hides all of them.
    """
    variables = os.environ if variables is None else variables
    present = [str(number) for number in range(_count())]
    for name in VARIABLES:
        if present and (listed := variables.get(name)) is not None:
            names = [device.strip() for device in listed.split(",")]
            # As in CUDA, an empty or negative entry hides itself and all entries after
            # it.
            hidden = (i for i, d in enumerate(names) if not d or d.startswith("-"))
            return names[: next(hidden, len(names))]
    return present


def of_host(variables: Mapping[str, str] | None = None) -> int:
    """Return how many GPUs the ranks of this host have, if each sees its own."""
    variables = os.environ if variables is None else variables
    count = variables.get(_OF_HOST, "")
    if not count and "SLURM_GPUS_PER_TASK" in variables:
        count = variables.get("SLURM_GPUS_ON_NODE", "")
    return max(len(granted(variables)), int(count) if count.isdecimal() else 0)


def are_shared(environment: Environment) -> bool:
    """Return whether this host has more ranks than GPUs, which NCCL refuses."""
    return 0 < of_host() < environment.local_size


def gpu_variables(
    environment: Environment, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that show one rank its own GPUs and no other rank's.

    The ranks of a host divide its GPUs evenly; if there are more ranks than GPUs, ranks
    share them in order. A host on which the job has one rank keeps all its GPUs.

    Returns:
        Variables to set before TensorFlow starts; possibly none.
    """
    devices, ranks = granted(variables), environment.local_size
    if not devices or ranks == 1:
        return {}
    if len(devices) < ranks:
        own = [devices[environment.local_rank * len(devices) // ranks]]
    else:
        each = len(devices) // ranks
        own = devices[environment.local_rank * each :][:each]
    names = VARIABLES if _is_amd() else VARIABLES[:1]
    of_all = {_OF_HOST: str(of_host(variables))}
    return of_all | dict.fromkeys(names, ",".join(own))


def _count() -> int:
    if _NVIDIA.is_dir():
        return len(os.listdir(_NVIDIA))
    if _is_amd():
        return sum("simd_count 0\n" not in _properties(node) for node in _AMD.iterdir())
    return 0


def _is_amd() -> bool:
    return not _NVIDIA.is_dir() and _AMD.is_dir()


def _properties(node: Path) -> str:
    try:
        return node.joinpath("properties").read_text()
    except OSError:  # a GPU that a container may not see
        return "simd_count 0\n"
