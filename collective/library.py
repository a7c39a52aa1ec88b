"""The native library through ctypes: where it is, its structures, its errors.

Mirrors ``native/c_api.h``; change both together.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import warnings
from pathlib import Path

from collective.errors import CollectiveError, UsageError

NATIVE = Path(__file__).parent / "native"
# What helps where the core is missing or is another version's.
HINT = (
    "install the wheel, which needs no compiler: pip install --force-reinstall --no-deps "
    "collective-VERSION-cp310-abi3-manylinux*.whl; in a checkout: apt-get install g++, "
    "then: make core"
)


class Disagreement(CollectiveError):
    """Ranks called different collectives; nothing was summed."""


class PeerLost(CollectiveError):
    """A rank died or left while others needed it; the job cannot continue."""


class Timeout(CollectiveError):
    """A rank was too late (COLLECTIVE_TIMEOUT)."""


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
            hint=HINT,
        ) from error
    _check_source(library)
    check_layout(library, Tensor, "collective_tensor")
    check_layout(library, Request, "collective_request")
    library.collective_error.restype = ctypes.c_char_p
    library.collective_kernels.restype = ctypes.c_char_p
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


def check_layout(
    library: ctypes.CDLL, mirror: type[ctypes.Structure], name: str
) -> None:
    """Compares a structure with the library's own: size and offset of each field.

    Args:
        library: The native library.
        mirror: Python's form of the structure.
        name: The structure, as ``collective_layout`` in ``native/layout.cc`` has it.

    Raises:
        CollectiveError: If they differ.
    """
    offsets = (str(getattr(mirror, field[0]).offset) for field in mirror._fields_)
    ours = f"{ctypes.sizeof(mirror)}: {' '.join(offsets)}"
    library.collective_layout.restype = ctypes.c_char_p
    theirs = library.collective_layout(name.encode()).decode()
    if theirs != ours:
        raise CollectiveError(
            f"{path()} does not fit this version of Python code: {name} is laid out as "
            f"'{theirs}' there, and as '{ours}' here",
            hint=HINT,
        )


def source_digest(root: Path = NATIVE.parent.parent) -> str | None:
    """The digest of the native sources, as ``cmake/source_digest.cmake`` has it.

    Args:
        root: The checkout.

    Returns:
        The digest; None in an installed package, which has no sources.
    """
    files = [root / "CMakeLists.txt", *(root / "collective/native").rglob("*.cc")]
    files += (root / "collective/native").rglob("*.h")
    if len(files) < 3 or not files[0].exists():
        return None
    names = sorted((file.relative_to(root).as_posix(), file) for file in files)
    digests = ((name, hashlib.sha256(f.read_bytes()).hexdigest()) for name, f in names)
    text = "".join(f"{name} {digest}\n" for name, digest in digests)
    return hashlib.sha256(text.encode()).hexdigest()


def stale(library: ctypes.CDLL) -> bool:
    """Whether the library was built from other sources than the checkout's."""
    sources = source_digest()
    library.collective_source.restype = ctypes.c_char_p
    return sources is not None and library.collective_source().decode() != sources


def _check_source(library: ctypes.CDLL) -> None:
    if not hasattr(library, "collective_source"):
        raise CollectiveError(
            f"{path()} was built from older sources than this Python code",
            hint=HINT,
        )
    if stale(library):
        warnings.warn(
            f"{path()} was not built from the sources beside it\nHINT: {HINT}",
            RuntimeWarning,
            stacklevel=3,
        )


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
