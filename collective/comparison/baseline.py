"""What changed since an earlier comparison, beyond noise."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collective.comparison.results import SCHEMA
from collective.errors import UsageError


@dataclass(frozen=True)
class Change:
    """One difference from the earlier result."""

    what: str  # a sentence
    worse: bool  # whether it should fail a build


def read(path: Path) -> dict[str, Any]:
    """Reads an earlier ``results.json``; a UsageError if the file is not one."""
    try:
        old = json.loads(path.read_text())
        missing = [k for k in ("schema", "options", "equal", "fast") if k not in old]
        if not missing and old["schema"] == SCHEMA:
            return old
        why = f"it has no {missing[0]!r}"
        if not missing:
            why = f"its schema is {old['schema']}, not {SCHEMA}"
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, TypeError) as error:
        why = str(error)
    raise UsageError(
        f"{path} is not an earlier result: {why}",
        hint="--against FOLDER/results.json of an earlier compare.py",
    )


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Compares two results, as JSON objects.

    A rate has changed if the ranges of its rounds do not overlap.
    """
    found = []
    for precision, proof in new["equal"].items():
        before = old["equal"].get(precision, {}).get("verdicts", {})
        for backend, verdict in proof["verdicts"].items():
            if backend in before and before[backend]["equal"] != verdict["equal"]:
                now = "is equal again" if verdict["equal"] else "is no longer equal"
                what = f"{backend} {now} in {precision}"
                found.append(Change(what, not verdict["equal"]))
    for replicas, timed in new["fast"].items():
        before = old["fast"].get(replicas, {})
        for backend, now in timed.items():
            was = before.get(backend)
            if not was or not was["rates"]:
                continue
            where = f"{backend} at {replicas} replicas"
            if not now["rates"]:
                found.append(Change(f"{where} {now['failure']}", True))
            elif max(now["rates"]) < min(was["rates"]):
                found.append(Change(_moved(where, was, now, "slower"), True))
            elif min(now["rates"]) > max(was["rates"]):
                found.append(Change(_moved(where, was, now, "faster"), False))
    return found


def _moved(where: str, was: Mapping, now: Mapping, how: str) -> str:
    before, after = (statistics.median_high(one["rates"]) for one in (was, now))
    return f"{where} is {how}: {before:,.0f} -> {after:,.0f} samples/s"
