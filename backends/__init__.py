"""One file per way to sum gradients, the interface they share, and a registry."""

from backends.base import Availability, Backend, Options
from backends.listing import print_list
from backends.registry import BACKENDS, get, list_backends

__all__ = [
    "BACKENDS",
    "Availability",
    "Backend",
    "Options",
    "get",
    "list_backends",
    "print_list",
]
