"""One file or folder for each way to sum gradients, and the interface they share.

Begin with ``base.py``, the interface, and ``single.py``, the shortest backend.
``capabilities.py`` has what only some backends can do, and ``registry.py`` has the
backends by name.

To add a backend: a file with a subclass of ``Backend``, and a line in ``registry.py``.
"""

from collective.backends.base import Availability, Backend
from collective.backends.factory import get
from collective.backends.options import Options
from collective.backends.registry import BACKENDS, list_backends

__all__ = [
    "BACKENDS",
    "Availability",
    "Backend",
    "Options",
    "get",
    "list_backends",
]
