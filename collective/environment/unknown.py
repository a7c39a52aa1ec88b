"""Variables named like ours that nothing reads: a misspelt time-out is not a time-out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

PREFIX = "COLLECTIVE_"
# The variables of docs/reference/environment.md, without the prefix.
KNOWN = frozenset(
    [
        "AGENT_FOLDER",
        "AGENT_PYTHON",
        "AGENT_SOCKET",
        "BOARD",
        "BUILD_CORE",
        "CONTAINED",
        "EXPLAIN",
        "GENERATION",
        "HOROVODRUN",
        "HOST_GPUS",
        "INTERFACES",
        "JOB",
        "JOINS",
        "LIBMPI",
        "LIBRARY",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "LOG",
        "MAX_NP",
        "MIN_NP",
        "OUTPUT",
        "OVERLAPS",
        "PORTABLE",
        "QUIET",
        "RANK",
        "RANKS_PER_HOST",
        "RANK_TIMEOUT",
        "RECORDER",
        "REMOTE_SHELL",
        "RESTARTABLE_JOB",
        "RESUME_SECONDS",
        "SANITIZE",
        "SECRET",
        "SECRET_FILE",
        "SEED",
        "SETS_HOROVOD_RANK",
        "SIMD",
        "SIZE",
        "SLURM_JOB",
        "STALL_SECONDS",
        "START_TIMEOUT",
        "STORES",
        "TIMEOUT",
        "VERIFY",
        "WAITS",
    ]
)


def warnings(variables: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that begins like ours and is unknown."""
    found = []
    for variable in sorted(variables):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in KNOWN or name.startswith("TEST_"):
            continue
        close = difflib.get_close_matches(name, KNOWN, 1)
        meant = f"; did you mean {PREFIX}{close[0]}?" if close else ""
        found.append(f"{variable} is not a variable that anything here reads{meant}")
    return found
