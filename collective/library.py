"""The native library through ctypes: where it is, its structures, its errors.

Mirrors ``native/c_api.h``; change both together.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from collective.errors import CollectiveError, UsageError

NATIVE = Path(__file__).parent / "native"


class Disagreement(CollectiveError):
    """Ranks called different collectives; nothing was summed."""


class PeerLost(CollectiveError):
    """A rank died or left while others needed it; the job cannot go on."""


class Timeout(CollectiveError):
    """A rank did not come in time (COLLECTIVE_TIMEOUT)."""


class Tensor(ctypes.Structure):
    """``collective_tensor``."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("dimensions", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class Request(ctypes.Structure):
    """``collective_request``."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("algorithm", ctypes.c_int32),
        ("transport", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("tensors_length", ctypes.c_int32),
        ("tensors", ctypes.POINTER(Tensor)),
        ("counts", ctypes.POINTER(ctypes.c_int64)),
        ("counts_length", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("plan", ctypes.c_int32),
        ("once", ctypes.c_int32),
        ("ticket", ctypes.c_int64),
        ("issued", ctypes.POINTER(ctypes.c_int64)),
    )


_ERRORS: dict[int, type[CollectiveError]] = {
    1: UsageError,
    2: Disagreement,
    3: PeerLost,
    4: Timeout,
    5: CollectiveError,
}


def path() -> Path:
    """Where the library is, or would be; ``COLLECTIVE_LIBRARY`` names another."""
    return Path(os.environ.get("COLLECTIVE_LIBRARY") or NATIVE / "libcollective.so")


def plugin() -> Path:
    """Where the plug-in for the MPI that launched this process is, or would be.

    Raises:
        CollectiveError: If the library was not built or does not load.
    """
    return Path(os.fsdecode(load().collective_plugin()))


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the native library, once.

    Raises:
        CollectiveError: If it was not built or does not load.
    """
    try:
        library = ctypes.CDLL(str(path()), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        built = path().exists()
        raise CollectiveError(
            f"the native core does not load: {error}"
            if built
            else f"the native core was not built: there is no {path().name}",
            hint="install a C++17 compiler (g++ or clang++), then: pip install -e .",
        ) from error
    library.collective_error.restype = ctypes.c_char_p
    library.collective_kernels.restype = ctypes.c_char_p
    library.collective_plugin.restype = ctypes.c_char_p
    library.collective_recorder_reason.restype = ctypes.c_char_p
    library.collective_recorder_begin.restype = ctypes.c_uint64
    library.collective_recorder_begin.argtypes = [
        ctypes.c_int32,
        ctypes.c_char_p,
        ctypes.c_int64,
    ]
    library.collective_recorder_position.restype = ctypes.c_void_p
    library.collective_recorder_end.argtypes = [ctypes.c_uint64, ctypes.c_int32]
    for name in ("collective_wait", "collective_finished"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    return library


def error_from(code: int, text: str) -> CollectiveError:
    """The exception for a code and message (with its HINT line) of the core."""
    message, _, hint = text.partition("\nHINT: ")
    kind = _ERRORS.get(code, CollectiveError)
    everywhere = kind in (Disagreement,)
    return kind(message, hint=hint or "see the message", everywhere=everywhere)


def message() -> str:
    """What the core says of this thread's last call that failed."""
    return load().collective_error().decode(errors="replace")


def check(code: int) -> None:
    """Raises what the core says if the code is not 0."""
    if code:
        raise error_from(code, message())
