"""What ranks other than rank 0 print."""

from __future__ import annotations

import os
import sys

RANK_ZERO, ALL = "rank0", "all"
OUTPUTS = (RANK_ZERO, ALL)


def silence() -> None:
    """Discards what this process writes to its standard output from now on.

    The file descriptor is replaced: libraries and child processes are silent, too.
    """
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
