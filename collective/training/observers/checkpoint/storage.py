"""One checkpoint on disk: written whole or not at all, and read only if undamaged.

A folder ``step-000000120`` holds

    model.weights.h5   weights, layer state and optimizer, in Keras' own format:
                       ``model.load_weights`` reads it
    training.npz       state that Keras' format cannot hold: running sums of the metrics,
                       losses, random state
    checkpoint.json    position, plan of the batches, history; CRC-32 of both files
                       and of itself

It is written under another name, synced to the disk, and then renamed. So at every moment
the folder has the old checkpoint or the new one, never half of it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from collective import disk
from collective.errors import first_line
from collective.training import keras_compat
from collective.training.loop.state import State, flatten, unflatten
from collective.training.model.variables import all_variables
from collective.training.observers.checkpoint import identity

FORMAT, VERSION = "collective.checkpoint", 1
WEIGHTS, ARRAYS, MANIFEST = "model.weights.h5", "training.npz", "checkpoint.json"
NAME = re.compile(r"step-(\d+)")
PART = ".part-"
REPLACED = f"{PART}replaced-"
_BLOCK = 1 << 20  # bytes that are read at a time


class Unusable(Exception):
    """A checkpoint cannot be used; the text says why, as the end of a sentence."""


class OtherTraining(Unusable):
    """A checkpoint is whole, but belongs to a training with other settings or data."""


def saved_in(folder: Path) -> list[Path]:
    """Return the folders named as checkpoints, the newest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(p.name[5:]), reverse=True)


def remove_parts(folder: Path) -> None:
    """Remove files that a killed process has left half written or half replaced."""
    for aside in folder.glob(f"{REPLACED}*"):
        target = folder / aside.name.removeprefix(REPLACED)
        if not target.exists():
            aside.rename(
                target
            )  # the process was killed before it had renamed the new one
    for part in folder.glob(f"{PART}*"):
        shutil.rmtree(part, ignore_errors=True)


def write(
    state: State,
    model: keras.Model,
    plan: Mapping[str, Any],
    folder: Path,
    training: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint, and return its folder; the model may train on during that time.

    Args:
        plan: Rows, sizes and seed, from which the batches are made.
        training: Describes the training of the checkpoint (``identity.py``).

    Raises:
        OSError: If it cannot be written; no part of it is left then.
    """
    target = folder / f"step-{state.step:09d}"
    part = folder / f"{PART}{target.name}"
    arrays, about = flatten(state)
    variables = all_variables(model)
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        left = keras_compat.weights_file.save_weights(
            model, variables, state.variables, part / WEIGHTS
        )
        held = set(range(len(variables))) - set(left)
        rest = io.BytesIO()
        unheld = {f"array_{i}": a for i, a in enumerate(arrays) if i not in held}
        np.savez(rest, **unheld)  # type: ignore[arg-type]
        _put(part / ARRAYS, rest.getvalue())
        body = {
            "format": FORMAT,
            "version": VERSION,
            "keras": keras.__version__,
            "plan": dict(plan),
            "state": about,
            "training": dict(training or {}),
            "files": {name: _sum(part / name) for name in (WEIGHTS, ARRAYS)},
        }
        body["crc32"] = _sum_of(body)
        _put(part / MANIFEST, json.dumps(body, indent=1).encode())
        disk.sync_folder(part)
        if target.exists():  # an unusable checkpoint, or the same one again
            aside = folder / f"{REPLACED}{target.name}"
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
        part.rename(target)
        disk.sync_folder(folder)
    finally:
        remove_parts(folder)
    return target


def read(
    path: Path,
    model: keras.Model,
    plan: Mapping[str, Any],
    training: Mapping[str, str] | None = None,
    anyway: bool = False,
) -> tuple[State, str]:
    """Read a checkpoint, and change nothing.

    Args:
        training: Describes this training (``identity.py``). If None, it is not compared.
        anyway: Whether a training with other settings or data may continue from it.

    Returns:
        The state, and a message for the user; mostly empty.

    Raises:
        Unusable: If it is torn, foreign, of another training, or cannot be read.
    """
    try:
        return _read(path, model, plan, training, anyway)
    except Unusable:
        raise
    except (OSError, MemoryError) as error:
        raise Unusable(f"it cannot be read: {first_line(error)}") from None
    except Exception as error:
        # Its checksums are right, so it is undamaged: another program has written it.
        why = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise Unusable(f"{MANIFEST} is not as this program writes it ({why})") from None


def _read(
    path: Path,
    model: keras.Model,
    plan: Mapping[str, Any],
    training: Mapping[str, str] | None,
    anyway: bool,
) -> tuple[State, str]:
    about = _manifest(path)
    for name in (WEIGHTS, ARRAYS):
        if not (path / name).is_file():
            raise Unusable(f"{name} is missing, or not a file")
        if _sum(path / name) != about["files"][name]:
            raise Unusable(f"{name} is torn: its checksum is another")
    variables = all_variables(model)
    specs = about["state"]["arrays"]
    saved = [s for s in specs if s["name"].startswith("variable ")]
    if [(tuple(s["shape"]), s["dtype"]) for s in saved] != [
        (tuple(v.shape), v.dtype) for v in variables
    ]:
        raise Unusable("it is of another model, optimizer or precision")
    for name in {**plan, **about["plan"]}:
        mine, theirs = plan.get(name), about["plan"].get(name)
        if theirs != mine:
            raise Unusable(f"it was made with {name} {theirs}, and here it is {mine}")
    saved_training, message = about.get("training") or {}, ""
    if training is not None and saved_training:
        found = identity.difference(saved_training, training)
        if found and not anyway:
            raise OtherTraining(found)
        message = found and f"{found}; it is used anyway"
    try:
        held = keras_compat.weights_file.load_weights(model, variables, path / WEIGHTS)
        with np.load(path / ARRAYS, allow_pickle=False) as rest:
            _check_members(rest.zip, path / ARRAYS)
            arrays = [
                rest[name] if (name := f"array_{i}") in rest else np.asarray(held[i])
                for i in range(len(specs))
            ]
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        reason = first_line(error)
        raise Unusable(f"its arrays cannot be read: {reason}") from None
    for spec, array in zip(specs, arrays, strict=True):
        if [*array.shape] != spec["shape"] or array.dtype.name != spec["dtype"]:
            raise Unusable(f"{spec['name']} is not what it should be")
    state = unflatten(arrays, about["state"])
    _check_position(state)
    if training is None:
        return state, message
    values, rate = identity.keep_new_rate(
        saved_training, training, model, state.variables
    )
    state = dataclasses.replace(state, variables=values)
    return state, "; ".join(filter(None, (message, rate)))


def _check_members(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise ValueError if the arrays are larger than their file, which is not compressed."""
    if sum(member.file_size for member in archive.infolist()) > path.stat().st_size:
        raise ValueError("its arrays are larger than the file")


def _check_position(state: State) -> None:
    """Check that every epoch has its logs, and every step its loss.

    A training that began with a later epoch (``initial_epoch``) has no logs of earlier ones.
    """
    numbers = (state.epoch, state.step)
    if any(type(n) is not int or n < 0 for n in numbers) or state.losses.ndim != 1:
        raise Unusable(
            f"epoch {state.epoch!r} and step {state.step!r} are not a position"
        )
    losses, logs = state.losses.size, max(map(len, state.history.values()), default=0)
    from_zero = logs >= state.epoch
    if losses > state.step or (from_zero and losses != state.step):
        raise Unusable(f"it has {losses} losses, and its step is {state.step}")


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file():
        raise Unusable(f"it is not a checkpoint: it has no {MANIFEST}")
    try:
        body = json.loads(file.read_text())
        if body.get("format") != FORMAT:
            raise Unusable("it is not a checkpoint of this program")
        if body["version"] != VERSION:
            raise Unusable(f"it is of version {body['version']}, here it is {VERSION}")
        checksum = body.pop("crc32")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Unusable(f"{MANIFEST} is torn") from None
    if _sum_of(body) != checksum:
        raise Unusable(f"{MANIFEST} is torn: its checksum is another")
    return body


def _sum_of(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def _sum(file: Path) -> str:
    """Return the CRC-32 of a file; it is not mapped, which some file systems cannot do."""
    found, block = 0, memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            found = zlib.crc32(block[:count], found)
    return f"{found:08x}"


def _put(path: Path, data: bytes) -> None:
    """Write a file, and sync it to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        disk.sync(file.fileno())
