"""One file or folder for each way to sum gradients, and the interface they share.

Begin with ``base.py``, the interface: about ten methods that every backend has. Then
``single.py``, the shortest backend, and ``mpi.py``, one with several processes. What only
some backends can do (elastic jobs, buckets, tensor parallelism, ...) is in
``capabilities.py``, and what users may choose in ``options.py``. ``registry.py`` has the
backends by name, ``factory.py`` makes one, and ``auto/`` chooses the fastest.

``launching.py`` starts jobs of a backend. ``devices.py`` sets up devices and threads;
``world.py`` connects processes for backends that need it.

To add a backend: a file with a subclass of ``Backend``, and a line in ``registry.py``.
"""

from collective.backends.base import Availability, Backend
from collective.backends.factory import get
from collective.backends.options import Options
from collective.backends.registry import BACKENDS, list_backends, print_list

__all__ = [
    "BACKENDS",
    "Availability",
    "Backend",
    "Options",
    "get",
    "list_backends",
    "print_list",
]
