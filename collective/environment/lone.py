"""A process that found no launcher although it is one of several.

A cluster may start a program several times without telling it of ranks. Each process
would train by itself, on all of the data, unnoticed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from collective.environment import launchers
from collective.environment.slurm import Slurm
from collective.errors import CollectiveError, UsageError
from collective.hosts import find_allocation

POD = "JOB_COMPLETION_INDEX"
ALONE = "export COLLECTIVE_RANK=0 COLLECTIVE_SIZE=1"
# Variables with the number of processes, of launchers that set no rank.
_SIZES = {
    "PMI_SIZE": "a PMI launcher",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "FLUX_JOB_SIZE": "Flux",
    "JSM_NAMESPACE_SIZE": "LSF's jsrun",
}


def check_launcher(variables: Mapping[str, str]) -> None:
    """Refuse to start a job if a cluster has started the launcher several times."""
    if "COLLECTIVE_AGENT_SOCKET" in variables:
        return  # agents have started one launcher for all
    found = launchers.find_launcher(variables)
    if found is None and POD in variables:
        raise _pod(variables)
    if isinstance(found, Slurm) and found.size() > 1:
        raise UsageError(
            f"srun started {found.size()} launchers, and each would start a job of its own",
            hint="collectiverun without srun, within the allocation; or one agent on each "
            "node: srun --ntasks-per-node=1 collectiverun --agent python train.py",
        )


def check_spawned() -> None:
    """End a process of ``multiprocessing`` that imports the script, and its parent.

    The parent would start it again and again, for ever.
    """
    processes = sys.modules.get("multiprocessing.process")
    mine = processes.current_process() if processes is not None else None
    # Python's own mark of such a process, which it uses for its error about the same
    # mistake.
    if getattr(mine, "_inheriting", False):
        print(
            f"error: {mine.name if mine else ''} was started by multiprocessing, imports "
            "the script again, and would train, too\n"
            "HINT: put the script's code under if __name__ == '__main__':",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(2)


def check_alone(variables: Mapping[str, str]) -> None:
    """Refuse to continue alone if a cluster has started, or was asked for, several.

    Args:
        variables: The environment, in which no launcher was found.

    Raises:
        UsageError: Names the variable that shows several processes, and what to type.
    """
    if POD in variables:
        raise _pod(variables)
    tasks = variables.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" in variables and tasks.isdigit() and int(tasks) > 1:
        raise _several(
            f"the Slurm job has {tasks} tasks, and only this process was started",
            "collectiverun python train.py, or srun python train.py on one node "
            "(docs/how-to/slurm.md)",
        )
    for name, launcher in _SIZES.items():
        if variables.get(name, "").isdigit() and int(variables[name]) > 1:
            raise _several(
                f"{launcher} started {variables[name]} processes ({name}), and no variable "
                "says which one this is",
                "start the job by mpirun or collectiverun",
            )
    _check_hosts(variables)
    _check_ray()


def _check_hosts(variables: Mapping[str, str]) -> None:
    """Refuse several hosts of LSF, PBS or Grid Engine; several slots may be cores."""
    try:
        found = find_allocation(variables)
    except CollectiveError:
        return  # for example a file that only the first host has
    if found and len(found.hosts) > 1 and found.system != "Slurm":
        raise _several(
            f"{found.system} has allocated {len(found.hosts)} hosts, and only this process "
            "was started",
            "collectiverun python train.py",
        )


def _check_ray() -> None:
    """Refuse a worker of Ray Train, which knows their number but sets no variable."""
    train = sys.modules.get("ray.train")
    if train is None:
        return
    try:
        size = train.get_context().get_world_size()
    except Exception:  # not in a worker of it
        return
    if size and size > 1:
        raise _several(
            f"Ray Train started {size} workers, and nothing connects them",
            "collective.ray.run(fn, num_workers=N) (docs/how-to/ray.md)",
        )


def _pod(variables: Mapping[str, str]) -> UsageError:
    return _several(
        f"this is pod {variables[POD]} of an Indexed Job of Kubernetes, and nothing has given "
        "it which ranks there are: each pod would train by itself",
        "collectiverun --agent --nodes N --head JOB-0.SERVICE:7070 python train.py "
        "in every pod (docs/how-to/kubernetes.md)",
    )


def _several(what: str, hint: str) -> UsageError:
    return UsageError(what, hint=f"{hint}; or, to train alone in each process: {ALONE}")
