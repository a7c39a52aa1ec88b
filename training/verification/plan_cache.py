"""The plans of steps that were verified before, by a digest of all they depend on.

In this process, and in the user's cache folder for the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from collective.errors import CollectiveError
from collective.net import private_files
from collective.training.replica.plan import StepPlan

_known: dict[str, StepPlan] = {}


def key_of(text: str) -> str:
    """The key of a step with this description."""
    return hashlib.sha256(text.encode()).hexdigest()


def _path(key: str) -> Path:
    return private_files.cache_folder() / "verified" / f"{key[:32]}.json"


def read(key: str) -> StepPlan | None:
    """The plan, if this step was verified before."""
    if key in _known:
        return _known[key]
    try:
        kept = json.loads(private_files.read(_path(key)))
        if kept["key"] != key:
            return None
        return StepPlan(
            bool(kept["gather_loss"]),
            bool(kept["gather_metrics"]),
            tuple(map(str, kept["notes"])),
            tuple((int(place), int(number)) for place, number in kept["look_ups"]),
        )
    except (OSError, ValueError, KeyError, TypeError, CollectiveError):
        return None


def write(key: str, plan: StepPlan) -> None:
    """Keeps a plan; on disk too, where that is possible."""
    _known[key] = plan
    kept = {"key": key} | asdict(plan)
    path = _path(key)
    part = path.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError, CollectiveError):
        private_files.folder(private_files.cache_folder())
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        private_files.write(part, json.dumps(kept, indent=1).encode())
        part.replace(path)
