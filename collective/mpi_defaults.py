"""Lets ``mpirun -np 4`` start four ranks on a machine with two cores.

Open MPI refuses to start more ranks than cores without ``--oversubscribe``, and refuses
root without two variables.
``python -m collective.mpi_defaults`` makes both the default for the Open MPI of this
Python environment, and for no other. It sets root's variables only if root runs it, as
in a container. ``make`` runs it, so that the README's commands work as they are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

MARK = "# Written by collective's set-up."
OVERSUBSCRIBE = "rmaps_default_mapping_policy = :oversubscribe"
AS_ROOT = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"


def write_defaults(prefix: Path) -> bool:
    """Write the defaults into a virtual environment; return whether they are set now.

    They are not set if the environment has no Open MPI 5 of its own: the MPI of a
    system or a cluster stays unchanged.
    """
    parameters = prefix / "etc" / "prte-mca-params.conf"
    if prefix == Path(sys.base_prefix) or not parameters.exists():
        return False
    _append(parameters, OVERSUBSCRIBE)
    activate = prefix / "bin" / "activate"
    if os.geteuid() == 0 and activate.exists():
        _append(activate, AS_ROOT)
    return True


def _append(file: Path, line: str) -> None:
    text = file.read_text()
    if line not in text:
        file.write_text(f"{text.rstrip()}\n\n{MARK}\n{line}\n")


if __name__ == "__main__":
    done = write_defaults(Path(sys.prefix))
    print(
        "mpirun may start more ranks than cores" if done else "mpirun stays unchanged"
    )
