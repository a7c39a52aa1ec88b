"""One file per way to sum gradients, the interface they share, and a registry."""

from collective.backends.base import Availability, Backend, Options
from collective.backends.listing import print_list
from collective.backends.registry import BACKENDS, get, list_backends

__all__ = [
    "BACKENDS",
    "Availability",
    "Backend",
    "Options",
    "get",
    "list_backends",
    "print_list",
]
