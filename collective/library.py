"""The native library: its path, its errors, and Python's extension of it.

Collectives go through the extension, in which each call takes less than a microsecond;
calls that are rare go through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from collective.errors import CollectiveError, UsageError
from collective.installation import CHECKOUT

NATIVE = Path(__file__).parent / "native"
# The remedy if the core is missing or is of another version.
HINT = (
    "apt-get install g++, then: make core"
    if CHECKOUT
    else "install the wheel, which needs no compiler: pip install --force-reinstall "
    "--no-deps keras_collective-VERSION-cp310-abi3-manylinux*.whl"
)


class Disagreement(CollectiveError):
    """Ranks called different collectives; nothing was summed."""


class PeerLost(CollectiveError):
    """A rank died or left while others needed it; the job cannot continue."""


class Timeout(CollectiveError):
    """A rank did not arrive within COLLECTIVE_TIMEOUT."""


# The exceptions by the core's code; any other code is a CollectiveError.
_ERRORS = {1: UsageError, 2: Disagreement, 3: PeerLost, 4: Timeout}
_OTHER = 5


def path() -> Path:
    """Return the path of the library; ``COLLECTIVE_LIBRARY`` names another."""
    return Path(os.environ.get("COLLECTIVE_LIBRARY") or NATIVE / "libcollective.so")


@functools.cache
def load() -> ctypes.CDLL:
    """Load the native library, once; raise a CollectiveError if it was not built."""
    try:
        library = ctypes.CDLL(str(path()), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _not_loaded("the native core", path(), error) from error
    _check_source(library)
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
    return library


@functools.cache
def extension() -> Any:
    """Load ``native/bindings/python.cc``, which lies next to the library, once."""
    load()
    name = "collective_python"
    file = path().with_name(f"{name}.abi3.so")
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        hint = (
            "install Python's headers (apt install python3-dev), then: pip install -e ."
        )
        raise _not_loaded("Python's extension", file, error, hint) from error
    module.prepare(_raise, np.empty, np.ndarray)
    return module


def _not_loaded(
    what: str, file: Path, error: Exception, to_build: str = HINT
) -> CollectiveError:
    if file.exists():
        return CollectiveError(f"{what} does not load: {error}", hint=HINT)
    missing = f"{what} was not built: there is no {file.name}"
    return CollectiveError(missing, hint=to_build)


def source_digest(root: Path = NATIVE.parent.parent) -> str | None:
    """Return the digest of native sources, as in ``cmake/source_digest.cmake``.

    Returns None in an installed package, which contains no sources.
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
    """Return whether the library was built from sources other than the checkout's."""
    sources = source_digest()
    library.collective_source.restype = ctypes.c_char_p
    return sources is not None and library.collective_source().decode() != sources


def _check_source(library: ctypes.CDLL) -> None:
    if not hasattr(library, "collective_source"):
        raise CollectiveError(
            f"{path()} was built from older sources than this Python code", hint=HINT
        )
    if stale(library):
        warnings.warn(
            f"{path()} was not built from the sources next to it\nHINT: {HINT}",
            RuntimeWarning,
            stacklevel=3,
        )


def _raise(code: int, text: str) -> NoReturn:
    """Raise the exception for a code and message (with its HINT line) of the core."""
    # This is not a mismatch of calls, although the core has one code for both.
    if text.startswith("collective is not initialized"):
        code = _OTHER
    message, _, hint = text.partition("\nHINT: ")
    kind = _ERRORS.get(code, CollectiveError)
    everywhere = kind is Disagreement
    raise kind(message, hint=hint or "see the message", everywhere=everywhere)


def check_code(code: int) -> None:
    """Raise the core's error of this thread's last call, unless the code is 0."""
    if code:
        _raise(code, load().collective_error().decode(errors="replace"))
