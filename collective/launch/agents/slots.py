"""How many ranks each node of an elastic job may have now, as Ray holds their resources."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

_NAME = "slots"


def write(folder: Path, slots: Mapping[int, int]) -> None:
    """Says it to the head of the job of this folder, by node, if there is one here."""
    part = folder / f"{_NAME}.part"
    with contextlib.suppress(FileNotFoundError):
        part.write_text(json.dumps({str(node): count for node, count in slots.items()}))
        part.replace(folder / _NAME)


def read(folder: Path | None) -> dict[int, int] | None:
    """What was written last; None for a job whose nodes have the slots they came with."""
    try:
        text = (folder / _NAME).read_text() if folder is not None else ""
    except FileNotFoundError:
        text = ""
    found = json.loads(text) if text else None
    return None if found is None else {int(node): n for node, n in found.items()}
