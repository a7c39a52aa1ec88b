"""Arrays in a ``.npz`` file, memory-mapped where possible.

``np.savez`` stores its members uncompressed, one after the other, and each can be mapped
in place: ten processes on a host share one copy in the page cache and read only the rows
they need. Files of ``np.savez_compressed`` are loaded into memory.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

import numpy as np

from collective.errors import UsageError
from collective.training.input.arrays import Arrays

_EXPECTED = (
    "keys x, y[, sample_weight] or x_train, y_train[, x_test, y_test], "
    "as numpy.savez(FILE, x=..., y=...) writes them"
)


def open_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return all arrays of a ``.npz`` file, memory-mapped if they are stored uncompressed.

    Raises:
        UsageError: The file is missing, damaged, or not a ``.npz`` of plain numbers.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                member.filename.removesuffix(".npy"): _array(path, archive, member)
                for member in archive.infolist()
            }
    except FileNotFoundError:
        raise UsageError(
            f"file {path} does not exist",
            hint=f"check the path of a .npz file with {_EXPECTED}",
        ) from None
    except (zipfile.BadZipFile, OSError, ValueError, struct.error, EOFError) as error:
        raise UsageError(
            f"{path} cannot be read as .npz: {error}",
            hint=f"write it again, complete, with {_EXPECTED}",
        ) from error


def npz_sources(path: str | os.PathLike[str]) -> tuple[Arrays, Arrays | None]:
    """Return the training and test rows of a ``.npz`` file; no test rows if it has none.

    Raises:
        UsageError: As ``open_npz``; or keys are missing.
    """
    arrays = open_npz(path)
    if {"x", "y"} <= arrays.keys():
        return _source(arrays, ""), None
    if {"x_train", "y_train"} <= arrays.keys():
        tested = {"x_test", "y_test"} <= arrays.keys()
        return _source(arrays, "_train"), _source(arrays, "_test") if tested else None
    raise UsageError(
        f"{path} has the keys {', '.join(sorted(arrays)) or 'of no array'}",
        hint=f"write it with {_EXPECTED}",
    )


def _source(arrays: dict[str, np.ndarray], suffix: str) -> Arrays:
    return Arrays(
        arrays["x" + suffix], arrays["y" + suffix], arrays.get("sample_weight" + suffix)
    )


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """Return one member, mapped if possible."""
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if member.compress_type == zipfile.ZIP_STORED and version in ((1, 0), (2, 0)):
            header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
            shape, fortran_order, dtype = header(stream)
            if not dtype.hasobject and np.prod(shape):
                return np.memmap(
                    path,
                    dtype,
                    mode="r",
                    offset=_data_offset(path, member) + stream.tell(),
                    shape=shape,
                    order="F" if fortran_order else "C",
                )
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """Return where the member's bytes start in the file: after its local header.

    The local header repeats the name and may have another extra field than the central
    directory, so its own two lengths must be read (APPNOTE.TXT, 4.3.7).
    """
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        fixed = file.read(30)
    name_length, extra_length = struct.unpack("<HH", fixed[26:30])
    return member.header_offset + len(fixed) + name_length + extra_length
