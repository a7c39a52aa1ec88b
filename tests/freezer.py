"""Processes in a frozen cgroup: they do nothing, and even SIGKILL does not end them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FREEZER = Path("/sys/fs/cgroup/freezer")  # version 1, because version 2 lets them die


def why_not() -> str:
    """Return why freezing is impossible here; empty if it is possible."""
    return "" if os.access(FREEZER, os.W_OK) else "no cgroup can be frozen here"


@contextlib.contextmanager
def frozen(processes: Sequence[int]) -> Iterator[None]:
    """Freeze them, until the end of the context."""
    group = FREEZER / f"collective-tests-{os.getpid()}"
    group.mkdir()
    try:
        for process in processes:
            (group / "cgroup.procs").write_text(str(process))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        _remove(group)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # its processes have not ended yet
            group.rmdir()
            return
        time.sleep(0.05)
