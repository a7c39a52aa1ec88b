"""One file or folder for each way to sum gradients, and the interface they share.

Begin with ``base.py``, the interface: about ten methods that every backend has. Then
``single.py``, the shortest backend, and ``mpi.py``, one with several processes. What only
some backends can do (elastic jobs, buckets, tensor parallelism, ...) is in
``capabilities/``, a class and its options in each file. ``registry.py`` has the backends
by name, ``factory.py`` makes one, and ``auto/`` chooses the fastest.

``launchers.py`` says what starts the ranks of each backend, ``launch_command.py`` makes
the command of it and ``supervised_run.py`` runs that. ``devices.py`` sets up devices and
threads; ``mpi_world.py``, ``core_world.py`` and ``addresses.py`` connect processes for
backends that need it.

To add a backend: a file with a subclass of ``Backend``, a line in ``registry.py`` and one
in ``launchers.py``.
"""

from collective.backends.base import Availability, Backend
from collective.backends.factory import get
from collective.backends.listing import print_list
from collective.backends.options import Options
from collective.backends.registry import BACKENDS, list_backends

__all__ = [
    "BACKENDS",
    "Availability",
    "Backend",
    "Options",
    "get",
    "list_backends",
    "print_list",
]
